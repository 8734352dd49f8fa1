"""What data cost at scale: opening, starting, memory, random against sequential reading, and preparing.

    python benchmarks/data_scale.py read --tokens 2e9 --out /data/scale
    python benchmarks/data_scale.py prepare --gigabytes 10 --out /data/scale

`read` makes a domain of copies of one shard of random letters; `prepare` makes a text file by repetition. Both print
one line a figure. A cold cache is one from which Linux has dropped the shards (`posix_fadvise`), not that of the disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from seqarch.data.datamodule import TextDataModule
from seqarch.data.order import DomainOrder
from seqarch.data.prepare import CHUNK_TOKENS, prepare
from seqarch.data.shards import INDEX, MANIFEST, Domain, PackedSequences
from seqarch.data.verified import remember, sha256_of

T = 2048
LINE = 4000
"""Letters in a document of the synthetic texts."""


def make_domain(root: Path, n_shards: int) -> None:
    """A domain whose training split is `n_shards` copies of one full shard."""
    folder = root / "big"
    if (folder / MANIFEST).is_file():
        return
    text = root / "letters.jsonl"
    rng = np.random.default_rng(0)
    with text.open("w") as file:
        for _ in range(int(1.05 * CHUNK_TOKENS / LINE)):
            letters = rng.integers(97, 123, LINE - 1, dtype=np.uint8).tobytes().decode()
            file.write(json.dumps({"text": letters}) + "\n")
    prepare([text], root, "one", "byte", holdout=0.01, workers=1)
    (root / "one").rename(folder)
    manifest = Domain(folder).manifest
    index = json.loads((folder / "train" / INDEX).read_text())
    first = folder / "train" / index["chunks"][0]["filename"]
    for path in (folder / "train").glob("chunk-*.bin"):
        if path != first:
            path.unlink()
    names = [f"chunk-0-{i}.bin" for i in range(n_shards)]
    for name in names[1:]:
        shutil.copyfile(first, folder / "train" / name)
    index["chunks"] = [{**index["chunks"][0], "filename": name} for name in names]
    (folder / "train" / INDEX).write_text(json.dumps(index))
    summary = manifest.splits["train"]
    files = {**dict.fromkeys(names, summary.files[first.name]), INDEX: sha256_of(folder / "train" / INDEX)}
    files["documents.bin"] = summary.files["documents.bin"]
    remember([folder / "train" / name for name in names], files[first.name])
    manifest.splits["train"] = dataclasses.replace(summary, tokens=n_shards * CHUNK_TOKENS, files=files)
    (folder / MANIFEST).write_text(manifest.to_json())


def data(root: Path, workers: int) -> TextDataModule:
    """The domain as a recipe opens it."""
    return TextDataModule(str(root), {"big": 1.0}, sequence_length=T, sequences_per_step=16, num_workers=workers)


def memory(pid: int) -> tuple[float, float]:
    """(private, proportional) memory of a process in MB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    kilobytes = {name: int(value.split()[0]) for name, value in fields.items()}
    return (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]) / 1024, kilobytes["Pss"] / 1024


def drop_caches(paths: Sequence[Path]) -> None:
    """Have Linux forget the pages of files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def seconds_per_sample(sequences: PackedSequences, samples: Sequence[int], *, cold: bool) -> float:
    """Time to read some sequences in an order."""
    if cold:
        drop_caches(sequences.shards.paths)
    start = time.perf_counter()
    for sample in samples:
        sequences[sample]
    return (time.perf_counter() - start) / len(samples)


def read(root: Path, n_tokens: float) -> None:
    """Print what it costs to open and read a domain of so many tokens."""
    root.mkdir(parents=True, exist_ok=True)
    n_shards = round(n_tokens / CHUNK_TOKENS)
    make_domain(root, n_shards)
    start = time.perf_counter()
    module = data(root, 0)
    module.setup("fit")
    print(f"tokens: {module._streams()[0].domain.manifest.splits['train'].tokens:,} in {n_shards} shards")
    print(f"open: {time.perf_counter() - start:.3f} s")
    for workers in (0, 2):
        start = time.perf_counter()
        batches = iter(data(root, workers).train_dataloader())
        next(batches)
        print(f"first batch of 16 x {T} with {workers} workers, with opening: {time.perf_counter() - start:.2f} s")
        start = time.perf_counter()
        for _ in range(500):
            next(batches)
        seconds = time.perf_counter() - start
        print(f"500 batches with {workers} workers: {500 * 16 * T / seconds / 1e6:.1f} million tokens/s")
        for worker in multiprocessing.active_children():
            private, shared = memory(worker.pid or 0)
            print(f"a worker after 500 batches: {private:.0f} MB private, {shared:.0f} MB proportional")
        del batches
    sequences = Domain(root / "big").sequences("train", T + 1)
    order = DomainOrder("big", sequences.counts, 0)
    n = 4000
    for cold in (True, False):
        in_order = seconds_per_sample(sequences, range(n), cold=cold)
        at_random = seconds_per_sample(sequences, [order.locate(turn) for turn in range(n)], cold=cold)
        kind = "cold" if cold else "warm"
        print(f"{kind}: {1e6 * in_order:.0f} µs per sequence in order, {1e6 * at_random:.0f} µs at random")
    start = time.perf_counter()
    for turn in range(n):
        order.locate(turn)
    print(f"the order itself: {1e6 * (time.perf_counter() - start) / n:.0f} µs per sequence")
    fit_one_step(root)


def fit_one_step(root: Path) -> None:
    """Print the time of a whole `seqarch fit` of one step."""
    shutil.rmtree(root / "run", ignore_errors=True)
    flags = {
        "run_dir": root / "run",
        "data.root": root,
        "data.train": "{big: 1.0}",
        "data.ood": "[]",
        "data.num_workers": 2,
        "trainer.max_steps": 1,
        "model.d_model": 32,
        "model.warmup_steps": 0,
        "model.n_layers": 1,
        "data.eval_tokens": 256,
    }
    command = [sys.executable, "-m", "seqarch", "fit", "--config", "recipes/quickstart.yaml"]
    start = time.perf_counter()
    subprocess.run([*command, *(f"--{key}={value}" for key, value in flags.items())], check=True, stdout=sys.stderr)
    seconds = time.perf_counter() - start
    record = json.loads((root / "run" / "run.json").read_text())
    print(f"fit of one step, from the first import to the report: {seconds:.1f} s ({record['status']})")


def processes_below(pid: int) -> Iterator[int]:
    """A process and those that it started."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from processes_below(int(child))


def prepare_text(root: Path, gigabytes: float) -> None:
    """Print the speed and the memory of `seqarch data prepare`."""
    root.mkdir(parents=True, exist_ok=True)
    text, rng = root / "text.jsonl", random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(5000)]
    block = "".join(json.dumps({"text": " ".join(rng.choices(words, k=600))}) + "\n" for _ in range(2000))
    with text.open("w") as file:
        while file.tell() < gigabytes * 1e9:
            file.write(json.dumps({"text": f"{file.tell()}"}) + "\n" + block)
    shutil.rmtree(root / "text", ignore_errors=True)
    command = [sys.executable, "-m", "seqarch", "data", "prepare", str(text), "--out", str(root), "--domain", "text"]
    start, most, largest, disk = time.perf_counter(), 0.0, 0.0, 0
    running = subprocess.Popen([*command, "--tokenizer", "byte"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    while running.poll() is None:
        sizes = []
        for pid in [*_alive(running.pid)]:
            try:
                sizes.append(memory(pid)[1])
            except OSError:
                continue
        most, largest = max(most, sum(sizes, 0.0)), max([largest, *sizes])
        disk = max(disk, _disk(root / "text"))
        time.sleep(0.5)
    seconds, size = time.perf_counter() - start, text.stat().st_size
    print((running.stdout.read() if running.stdout else b"").decode().strip())
    print(
        f"{size / 1e9:.2f} GB of text in {seconds:.0f} s: {size / 1e6 / seconds:.1f} MB/s with {os.cpu_count()} cores"
    )
    print(f"memory: {most:.0f} MB all processes together, {largest:.0f} MB the largest (proportional)")
    print(f"disk: at most {disk / 1e9:.2f} GB, not counting the text")


def _alive(pid: int) -> list[int]:
    try:
        return list(processes_below(pid))
    except OSError:
        return []


def _disk(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("read", "prepare"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=2e9)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    args = parser.parse_args()
    if args.what == "read":
        read(args.out, args.tokens)
    else:
        prepare_text(args.out, args.gigabytes)


if __name__ == "__main__":
    main()
