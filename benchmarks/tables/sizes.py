"""Do the gaps of `small` (42M parameters) predict those of `medium` (110M)? For docs/scale.md.

    python -m benchmarks.tables.sizes --register    # before the runs: `benchmarks/order_110m.csv`
    python -m benchmarks.tables.sizes               # after them: the figure `docs/results/medium/sizes.png`

The order is predicted and scored by `seqarch.scale`. `benchmarks/predictions.csv` has an interval for each gap.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.tables.results import REFERENCE, RESULTS, SMALL
from seqarch.scale.decisions import Rungs
from seqarch.scale.registered import register
from seqarch.tables import read_csv

ORDER = Path(__file__).parents[1] / "order_110m.csv"
MEDIUM = 131072000
"""Tokens of the runs with 110M parameters."""
AT_SMALL = {
    **{name: name for name in (REFERENCE, "transformer", "top1_chunk", "mamba2", "rwkv7", "delta_net", "based")},
    "window_256": "window_128",
}
"""The models of `medium`, each with its name at `small`. There a window of 128 has the same share of the sequence."""


def rungs(loss: str) -> Rungs:
    """The gaps or the in-domain losses of the models at both sizes, by seed; the gap of the reference is zero."""
    found: Rungs = {}
    for size, folder, tokens in (("42M", "fourteen", SMALL), ("110M", "medium", MEDIUM)):
        path = RESULTS / folder / ("pairs.csv" if loss == "gap" else "losses.csv")
        rows = read_csv(path) if path.is_file() else []
        models = {small if size == "42M" else model: model for model, small in AT_SMALL.items()}
        losses: dict[str, list[float]] = {REFERENCE: [0.0]} if loss == "gap" and rows else {}
        for row in rows:
            if row["model"] in models and int(row["tokens"]) == tokens:
                losses.setdefault(models[row["model"]], []).append(float(row[loss]))
        if losses:
            found[size] = losses
    return found


def main() -> None:
    if sys.argv[1:] == ["--register"]:
        for loss in ("gap", "in_domain"):
            register(ORDER, loss, rungs(loss))


if __name__ == "__main__":
    main()
