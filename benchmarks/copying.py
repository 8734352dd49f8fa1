"""Whether a model looks up what followed a token before: its loss on random tokens, and on the same said again.

    python benchmarks/copying.py RUN... --data shards/web --csv copying.csv

Each sequence is N tokens drawn at random from the hold-out of a domain, twice in a row. Nothing but the first half
tells the second, so the fall of the loss between them measures copying (the induction of arXiv 2209.11895, section 2).
A RUN is a run folder with checkpoints; each of them gives a row.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from seqarch.bench.rows import Table
from seqarch.data.shards import open_domain
from seqarch.experiment.load import load
from seqarch.runs.layout import checkpoints

COLUMNS = ("run", "step", "sequences", "tokens", "loss_first", "loss_again", "copying")


def repeated_tokens(domain: Path, sequences: int, tokens: int, seed: int = 0) -> Tensor:
    """`[sequences, 2 * tokens]` ids, the second half of each row equal to the first."""
    text = torch.cat(list(open_domain(domain.parent, domain.name).sequences("holdout", 1024)))
    generator = torch.Generator().manual_seed(seed)
    drawn = text[torch.randint(len(text), (sequences, tokens), generator=generator)]
    return drawn.repeat(1, 2)


@torch.no_grad()
def halves(checkpoint: Path, ids: Tensor, batch: int = 16) -> tuple[float, float]:
    """Mean loss in nats a token of the first reading and of the second, both without their first token."""
    lm, _ = load(checkpoint)
    device = next(lm.parameters()).device
    n = ids.shape[1] // 2
    losses = []
    for rows in ids.split(batch):
        rows = rows.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            losses.append(lm(rows[:, :-1], rows[:, 1:], reduction="none").double())
    loss = torch.cat(losses)
    return float(loss[:, : n - 1].mean()), float(loss[:, n:].mean())


def measure(runs: Sequence[Path], data: Path, table: Table, sequences: int, tokens: int) -> None:
    """A row for each checkpoint of the runs."""
    ids = repeated_tokens(data, sequences, tokens)
    for run in runs:
        for path in checkpoints(run):
            first, again = halves(path, ids)
            step = int(path.stem.removeprefix("step_"))
            print(f"{run} step {step}: {first:.3f} nats, said again {again:.3f}", flush=True)
            losses = (round(first, 4), round(again, 4), round(first - again, 4))
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
