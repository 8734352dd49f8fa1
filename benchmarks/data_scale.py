"""Measures data at scale: opening, starting, memory, random and sequential reading, and preparing.

    python benchmarks/data_scale.py read --tokens 2e9 --out /data/scale
    python benchmarks/data_scale.py prepare --gigabytes 10 --out /data/scale

`read` makes a domain of copies of one shard of random letters. `prepare` repeats the text of the embedded corpus. Both
print one line per number. With a cold cache, Linux has dropped the shards from memory (`posix_fadvise`). The disk's own
cache stays.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from seqarch import Experiment
from seqarch.data import verified
from seqarch.data.assemble import CHUNK_TOKENS
from seqarch.data.cache import ShardCache
from seqarch.data.corpus import find_root
from seqarch.data.datamodule import TextDataModule
from seqarch.data.loader import AT_ONCE
from seqarch.data.order import DomainOrder
from seqarch.data.prepare import prepare
from seqarch.data.shards import BLOCK, BLOCKS, INDEX, MANIFEST, Domain, PackedSequences
from seqarch.data.verified import sha256_of
from seqarch.training.callbacks import RunCheckpoint

T = 2048
LINE = 4000
"""Letters in a document of the synthetic texts."""
WINDOW, REPEATS, TURNS, BATCHES = 4, 5, 14, 1000


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
    checksums = (folder / "train" / BLOCKS).read_bytes()[: 4 * CHUNK_TOKENS // BLOCK]
    (folder / "train" / BLOCKS).write_bytes(n_shards * checksums)
    files |= {"documents.bin": summary.files["documents.bin"], BLOCKS: sha256_of(folder / "train" / BLOCKS)}
    manifest.splits["train"] = dataclasses.replace(summary, tokens=n_shards * CHUNK_TOKENS, files=files)
    (folder / MANIFEST).write_text(manifest.to_json())


def data(root: Path, workers: int, window: int | None = None) -> TextDataModule:
    """The domain as a recipe opens it."""
    return TextDataModule(
        str(root), {"big": 1.0}, sequence_length=T, sequences_per_step=16, num_workers=workers, shuffle_window=window
    )


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


class InOrder(DomainOrder):
    """The shards' samples in their order on disk."""

    def locate(self, turns: np.ndarray) -> np.ndarray:
        return turns


def microseconds(sequences: PackedSequences, order: DomainOrder, n: int, *, cold: bool) -> tuple[float, float]:
    """Wall and CPU time to order and read a sequence: the first `n` of an order, read ahead as in training."""
    cache = ShardCache([sequences], [order], None)
    if cold:
        drop_caches(sequences.shards.paths)
    start, cpu = time.perf_counter(), time.process_time()
    for turn, sample in enumerate(located(order, n)):
        cache.enter(0, turn)
        sequences[sample]
    seconds = time.perf_counter() - start
    if cache._reader:
        cache._reader.join()
    return 1e6 * seconds / n, 1e6 * (time.process_time() - cpu) / n


def located(order: DomainOrder, n: int) -> Iterator[int]:
    """The first samples of an order, computed in blocks as in training."""
    for start in range(0, n, AT_ONCE):
        yield from order.locate(np.arange(start, min(start + AT_ONCE, n))).tolist()


def compare_orders(sequences: PackedSequences) -> None:
    """Print the median wall time and the least CPU time to read a sequence. Orders take turns, `REPEATS` times."""
    name, counts, whole_windows = "big", sequences.counts, WINDOW * sequences.counts[0]
    for sample in range(0, len(sequences), counts[0]):  # each shard is compared with its checksum
        sequences[sample]
    for cold in (True, False):
        times: dict[str, list[tuple[float, float]]] = {}
        for path in [] if cold else sequences.shards.paths:
            path.read_bytes()
        for seed in range(REPEATS):
            for label, order, n in (
                ("in order", InOrder(name, counts, seed), whole_windows),
                (f"at random in a window of {WINDOW} shards", DomainOrder(name, counts, seed, WINDOW), whole_windows),
                ("at random in the domain", DomainOrder(name, counts, seed), 2000),
            ):
                times.setdefault(label, []).append(microseconds(sequences, order, n, cold=cold))
        for label, each in times.items():
            wall, cpu = zip(*each, strict=True)
            print(
                f"{'cold' if cold else 'warm'}, {label}: {statistics.median(wall):.1f} µs per sequence, at least "
                f"{min(cpu):.1f} µs of CPU time"
            )
    for window in (None, WINDOW):
        order, n, cpu = DomainOrder(name, counts, 0, window), whole_windows, []
        for _ in range(REPEATS):
            start = time.process_time()
            for _ in located(order, n):
                pass
            cpu.append(1e6 * (time.process_time() - start) / n)
        print(f"the order itself, window {window}: at least {min(cpu):.2f} µs of CPU time per sequence")


def compare_loaders(root: Path) -> None:
    """Print what random order adds to the CPU time of the loader, as the median over turns, with shards in memory."""
    for path in Domain(root / "big").sequences("train", T + 1).shards.paths:
        path.read_bytes()
    added: dict[int | None, list[float]] = {None: [], WINDOW: []}
    for _ in range(TURNS):
        with mock.patch.object(DomainOrder, "locate", InOrder.locate):
            in_order = loader_seconds(root, None)
        for window, each in added.items():
            each.append(100 * (loader_seconds(root, window) / in_order - 1))
    for window, each in added.items():
        low, middle, high = statistics.quantiles(each, n=4)
        print(
            f"loader, random order, window {window}: {middle:+.1f} % of CPU time, quartiles {low:+.1f} and {high:+.1f}"
        )


def loader_seconds(root: Path, window: int | None) -> float:
    """CPU time of `BATCHES` batches in this process."""
    batches = iter(data(root, 0, window).train_dataloader())
    next(batches)
    start = time.process_time()
    for _ in range(BATCHES):
        next(batches)
    return time.process_time() - start


def read(root: Path, n_tokens: float) -> None:
    """Print what it costs to open and read a domain with this number of tokens."""
    root.mkdir(parents=True, exist_ok=True)
    n_shards = round(n_tokens / CHUNK_TOKENS)
    make_domain(root, n_shards)
    start = time.perf_counter()
    module = data(root, 0)
    module.setup("fit")
    print(f"tokens: {module._splits[0].domain.manifest.splits['train'].tokens:,} in {n_shards} shards")
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
    compare_orders(Domain(root / "big").sequences("train", T + 1))
    compare_loaders(root)
    for checked in (True, False):
        first_step(root, checked)


def first_step(root: Path, checked: bool) -> None:
    """Print the time from opening the data to the end of the first step of `fit`, with shards that are not in memory.

    Args:
        root: folder of the domain.
        checked: whether the shards were compared with their checksums before, on this machine.
    """
    shutil.rmtree(root / "run", ignore_errors=True)
    drop_caches(list((root / "big").rglob("*.bin")))
    if not checked:
        os.environ["SEQARCH_CACHE"] = tempfile.mkdtemp()
        verified._matched.clear()
    flags = {
        "run_dir": root / "run",
        "data.root": root,
        "data.train": {"big": 1.0},
        "data.ood": [],
        "data.sequence_length": T,
        "data.num_workers": 2,
        "trainer.max_steps": 1,
        "model.d_model": 32,
        "model.warmup_steps": 0,
        "model.n_layers": 1,
        "data.eval_tokens": 256,
    }
    opened: list[float] = []
    prepare_data, stepped = TextDataModule.prepare_data, RunCheckpoint.on_train_batch_end

    def note(self: TextDataModule) -> None:
        opened.append(time.perf_counter())
        prepare_data(self)

    def say(self: RunCheckpoint, *args: Any) -> None:
        private, shared = max(memory(worker.pid or 0) for worker in multiprocessing.active_children())
        print(
            f"first step, shards {'' if checked else 'not '}checked before: {time.perf_counter() - opened[0]:.1f} s "
            f"after opening the data; a worker: {private:.0f} MB private, {shared:.0f} MB proportional"
        )
        stepped(self, *args)

    with (
        mock.patch.object(TextDataModule, "prepare_data", note),
        mock.patch.object(RunCheckpoint, "on_train_batch_end", say),
    ):
        Experiment.from_recipe("quickstart", flags).fit(figures=False)


def processes_below(pid: int) -> Iterator[int]:
    """A process and those that it started."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from processes_below(int(child))


def prepare_text(root: Path, gigabytes: float, tokenizer: str, workers: int) -> None:
    """Print the speed and the memory of `seqarch data prepare`. Its 1 GB files are links, which saves disk."""
    root.mkdir(parents=True, exist_ok=True)
    text = (find_root("embedded") / "texts/docs.jsonl").read_text()
    size = min(gigabytes, 1.0) * 1e9
    files = [root / f"text-{number}.jsonl" for number in range(round(gigabytes * 1e9 / size))]
    with files[0].open("w") as file:
        while file.tell() < size:
            file.write(json.dumps({"text": f"{file.tell()}"}) + "\n" + text)
    for link in files[1:]:
        link.unlink(missing_ok=True)
        link.hardlink_to(files[0])
    shutil.rmtree(root / "text", ignore_errors=True)
    flags = {"out": root, "domain": "text", "tokenizer": tokenizer, "workers": workers}
    command = [sys.executable, "-m", "seqarch", "data", "prepare", *map(str, files)]
    start, sizes, disk = time.perf_counter(), [], 0
    running = subprocess.Popen(
        [*command, *(f"--{key}={value}" for key, value in flags.items())], stderr=subprocess.DEVNULL
    )
    while running.poll() is None:
        sizes.append([_proportional(pid) for pid in _alive(running.pid)])
        disk = max(disk, _disk(root / "text"))
        time.sleep(1)
    seconds, n_bytes = time.perf_counter() - start, sum(path.stat().st_size for path in files)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{n_bytes / 1e9:.2f} GB of text with {workers} workers in {seconds:.0f} s, {used.ru_utime:.0f} s of CPU time "
        f"and {used.ru_stime:.0f} s of the system: {n_bytes / 1e6 / (used.ru_utime + used.ru_stime):.1f} MB/s and core"
    )
    tenths = [max(part) for part in np.array_split([sum(each) for each in sizes], 10) if len(part)]
    print("memory of all processes in each tenth of the time, MB:", *(f"{size:.0f}" for size in tenths))
    print(f"memory of the largest: {max(max(each, default=0) for each in sizes):.0f} MB")
    print(f"disk: at most {disk / 1e9:.2f} GB, not counting the text")


def _proportional(pid: int) -> float:
    try:
        return memory(pid)[1]
    except OSError:
        return 0.0


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
    parser.add_argument("--tokenizer", default="byte")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    if args.what == "read":
        read(args.out, args.tokens)
    else:
        prepare_text(args.out, args.gigabytes, args.tokenizer, args.workers)


if __name__ == "__main__":
    main()
