"""Attention to 2,048 tokens, forward and backward, called from Python and replayed from a CUDA graph, on a GPU.

    python benchmarks/replayed.py --csv replayed.csv

At this length the launches of several small kernels take the time of Top-1 chunk attention. A graph has the work of the
GPU only. Dense attention is timed in the same way.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from seqarch.bench.jobs import Row, Table
from seqarch.bench.kernels import COLUMNS, line
from seqarch.bench.timing import DENSE, SELECTIONS, against, draw, forward_backward, measure

SHAPES = ((32, 2048, 12, 64), (16, 2048, 16, 128))
"""B, T, H and D."""


def rows() -> Iterator[Row]:
    for B, T, H, D in SHAPES:
        tensors = draw(B, T, H, D)
        sharp = {f"{name}, scale sqrt(D)": partial(op, scale=D**0.5) for name, op in SELECTIONS.items()}
        dense: dict[str, list[Row]] = {"called": [], "replayed": []}
        for name, op in {**DENSE, **SELECTIONS, **sharp}.items():
            run = forward_backward(op, tensors)
            for way in ("called", "replayed"):
                row = measure(f"{name}, {way}: fwd+bwd", run, replay=way == "replayed", B=B, T=T, H=H, D=D)
                if name in DENSE:
                    dense[way].append(row)
                yield row if name in DENSE else against(dense[way], row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "replayed.py needs an NVIDIA GPU, and PyTorch sees none here\n")
    torch.manual_seed(0)
    table = Table(COLUMNS, args.csv, line)
    for row in rows():
        table.add({"step": "replayed", **row})


if __name__ == "__main__":
    main()
