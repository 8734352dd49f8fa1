"""Kills one run again and again, damages its checkpoints and fills its disk. It must end like an undisturbed run.

    python benchmarks/soak.py --out /mnt/small --kills 50

OUT/whole      the undisturbed run
OUT/disturbed  the run that is killed at random steps; after a kill the same command starts it again
OUT/log        the output of the last process

On a file system of less than 1 GiB, such as a small tmpfs, a file fills the disk. Elsewhere a limit on the size of
files replaces a full disk. Every refusal must be one line. The refusal of a damaged checkpoint must name it and the one
before it, from which the run continues. Exit status 0 means the same curves, weights and optimizer, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from seqarch import cli
from seqarch.experiment import run
from seqarch.runs.folder import checkpoints

STEPS_PER_KILL = 20
OPTIONS = {
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
    "model.d_model": 32,
    "model.n_layers": 2,
    "data.sequence_length": 64,
    "data.sequences_per_step": 4,
    "data.eval_tokens": 512,
    "train_loss.every_n_steps": 1,
    "ood_loss.every_n_steps": 25,
    "attention_entropy.every_n_steps": 0,
    "throughput.every_n_steps": 0,
    "checkpoint.every_n_steps": 10,
}
ROOM = 1 << 30
FILLER = "filler"


def start(folder: Path, steps: int, log: Path, *, largest_file: int | None = None) -> int:
    """Start `seqarch fit` in a process forked from this one; return its id."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    if child := os.fork():
        return child
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    options = {**OPTIONS, "trainer.max_steps": steps, "model.warmup_steps": 20, "run_dir": folder}
    status = 1
    try:
        run.report = lambda runs, out: [out / "index.html"]  # pyright: ignore
        cli.main(["fit", "--config", "quickstart", *(f"--{key}={value}" for key, value in options.items())])
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(child: int) -> int | None:
    """The exit status of a child, negative for a signal; `None` while it runs."""
    done, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def last_step(folder: Path) -> int:
    """The last step in `curves.csv`, or -1 if there is none."""
    try:
        lines = (folder / "curves.csv").read_text().split("\n")[1:-1]
        return int(lines[-1].split(",")[0]) if lines else -1
    except (OSError, ValueError):
        return -1


def damage(path: Path, how: str) -> None:
    """Cut a file short, or flip one of its bits."""
    content = bytearray(path.read_bytes())
    at = random.randrange(len(content))
    if how == "cut short":
        del content[at:]
    else:
        content[at] ^= 1 << random.randrange(8)
    path.write_bytes(content)


@contextlib.contextmanager
def full_disk(out: Path) -> Iterator[int | None]:
    """Fill a small file system. On a large one, return the size that no file may exceed."""
    if shutil.disk_usage(out).total > ROOM:
        yield 40_000 + (out / "disturbed/curves.csv").stat().st_size  # a checkpoint is larger
        return
    with contextlib.suppress(OSError), (out / FILLER).open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    with (out / FILLER).open("r+b") as file:
        file.truncate(max(0, (out / FILLER).stat().st_size - random.randrange(200_000)))
    try:
        yield None
    finally:
        (out / FILLER).unlink()


def comparable(folder: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The rows of the curves, and the last checkpoint."""
    with (folder / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return rows, torch.load(checkpoints(folder)[-1], weights_only=True)


def same(one: Any, other: Any) -> bool:
    """Whether nested values are equal bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


class Soak:
    """A run that is disturbed.

    Args:
        out: the folder of this soak.
        kills: how often the run is killed.
    """

    def __init__(self, out: Path, kills: int) -> None:
        self.out, self.folder, self.log = out, out / "disturbed", out / "log"
        self.steps = STEPS_PER_KILL * kills
        self.seen: Counter[str] = Counter()
        self.targets = sorted(random.sample(range(1, self.steps), kills))

    def disturb(self) -> None:
        """Kill the run at each target, with faults in between, then let it end."""
        for number, target in enumerate(self.targets, start=1):
            self._kill_at(target)
            if number % 5 == 0 and (newest := checkpoints(self.folder)[-1:]):
                how = "cut short" if number % 2 else "a flipped bit"
                damage(newest[0], how)
                self.seen[f"newest checkpoint damaged: {how}"] += 1
            if number % 7 == 0:
                self._fill()
            print(f"kill {number} at step {last_step(self.folder)}", flush=True)
        child = self._start()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, self.log.read_text()

    def _start(self, largest_file: int | None = None) -> int:
        """Start the run and return its process. If it refuses a damaged checkpoint, go back to the one it offers."""
        while True:
            child = start(self.folder, self.steps, self.log, largest_file=largest_file)
            while (status := ended(child)) is None:
                if " parameters, steps " in self.log.read_text():
                    return child
                time.sleep(0.01)
            said = self._one_line(status)
            offer = re.search(r"is damaged: .*the newest whole one is (\S+): remove the newer ones", said)
            if offer is None:
                raise AssertionError(said)
            for newer in checkpoints(self.folder)[checkpoints(self.folder).index(Path(offer[1])) + 1 :]:
                newer.unlink()
            self.seen["damaged checkpoint refused, gone on from the one offered"] += 1

    def _kill_at(self, target: int) -> None:
        child = self._start()
        while last_step(self.folder) < target:
            assert ended(child) is None, self.log.read_text()
            time.sleep(0.003)
        time.sleep(random.random() * 0.03)  # anywhere within a step, also while a checkpoint is written
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        self.seen["SIGKILL"] += 1

    def _fill(self) -> None:
        """Let the run meet a full disk. It must say so in one line and keep every whole checkpoint whole."""
        child = self._start()
        before = {path: path.read_bytes() for path in checkpoints(self.folder)}
        with full_disk(self.out) as largest_file:
            if largest_file is not None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                child = self._start(largest_file)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self._one_line(status)
        left = list((self.folder / "checkpoints").glob("*.partial"))
        assert not left, left
        assert all(path.read_bytes() == content for path, content in before.items() if path.exists())
        self.seen["full disk"] += 1

    def _one_line(self, status: int) -> str:
        said = self.log.read_text()
        errors = [line for line in said.splitlines() if line.startswith("seqarch: error: ")]
        assert status == 2, (status, said)
        assert len(errors) == 1, said
        assert "Traceback" not in said, said
        return errors[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    begin = time.time()
    soak = Soak(args.out, args.kills)
    whole = start(args.out / "whole", soak.steps, soak.log)
    assert os.waitstatus_to_exitcode(os.waitpid(whole, 0)[1]) == 0, soak.log.read_text()
    soak.disturb()
    curves, weights = (same(*pair) for pair in zip(*map(comparable, (args.out / "whole", soak.folder)), strict=True))
    for what, times in soak.seen.items():
        print(f"{times:3} x {what}")
    print(f"{soak.steps} steps in {(time.time() - begin) / 60:.1f} minutes")
    print(f"same curves: {curves}; same checkpoint: {weights}")
    sys.exit(0 if curves and weights else 1)


if __name__ == "__main__":
    main()
