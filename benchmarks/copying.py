"""How well the checkpoints of a run copy: the task `seqarch.evaluation.Copying`, one row per checkpoint.

    python benchmarks/copying.py RUN... --data shards/web --csv copying.csv

A RUN is a run folder with checkpoints. The random tokens come from the hold-out of the domain `--data`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from seqarch.bench.rows import Table
from seqarch.data.datamodule import TextDataModule
from seqarch.evaluation import Copying, Scorer, evaluate
from seqarch.experiment.load import load
from seqarch.model import SequenceLM
from seqarch.runs import tags
from seqarch.runs.layout import checkpoints

COLUMNS = ("run", "step", "sequences", "tokens", "loss_first", "loss_again", "copying")


def scorer_of(lm: SequenceLM) -> Scorer:
    """A scorer, in bf16 on a GPU and in float32 elsewhere."""
    device = next(lm.parameters()).device.type
    return Scorer(lm, context=lambda: torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"))


def measure(runs: Sequence[Path], domain: Path, table: Table, sequences: int, tokens: int) -> None:
    """Add a row for each checkpoint of the runs."""
    data = TextDataModule(str(domain.parent), {domain.name: 1.0}, [], sequence_length=2 * tokens - 1)
    task = Copying(sequences, tokens)
    for run in runs:
        for path in checkpoints(run):
            found = evaluate([task], scorer_of(load(path)[0]), data).metrics
            step = int(path.stem.removeprefix("step_"))
            losses = [round(found[tag], 4) for tag in (tags.COPYING_FIRST, tags.COPYING_AGAIN, tags.COPYING_GAIN)]
            print(f"{run} step {step}: {losses[0]:.3f} nats, said again {losses[1]:.3f}", flush=True)
            table.add(dict(zip(COLUMNS, (str(run), step, sequences, tokens, *losses), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--data", type=Path, required=True, help="the folder of a prepared domain")
    parser.add_argument("--csv", type=Path, default=None)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a reading")
    args = parser.parse_args()
    if empty := [str(run) for run in args.runs if not checkpoints(run)]:
        parser.error(f"no checkpoints in {', '.join(empty)}: an exam removes its own, `seqarch fit` keeps them")
    measure(args.runs, args.data, Table(COLUMNS, args.csv), args.sequences, args.tokens)


if __name__ == "__main__":
    main()
