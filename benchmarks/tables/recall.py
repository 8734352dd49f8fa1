"""The tables of docs/results/recall.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from seqarch_recall.figure import published_accuracy

from seqarch.tables import read_csv

FOLDER = Path(__file__).parents[2] / "docs/results/recall"
STUDENT = 2.3646
"""Student's t at 97.5 % for the eight pairs of seeds of `reasons.csv`."""
Table = list[list[str]]


def mqar() -> Table:
    """The points of the recall exam, the smallest state first, with published accuracies."""
    points = json.loads((FOLDER / "mqar.json").read_text(encoding="utf-8"))["points"]
    table = [["mixer", "state elements", "accuracy", "epochs", "published"]]
    for point in sorted(points, key=lambda point: (point["state_elements"], point["accuracy"])):
        window = point["options"].get("window") if point["class"] == "Attention" else None
        name = f"`{point['class']}`" + (f", window {window}" if window else "")
        known = published_accuracy(point)
        epochs = str(point["epochs"]) + ("" if point["finished"] else ", stopped")
        row = [name, f"{point['state_elements']:,}", f"{point['accuracy']:.3f}", epochs]
        table.append([*row, "-" if known is None else f"{known:.2f}"])
    return table


def convolution_gain() -> str:
    """The mean accuracy that Zoology's convolution adds to Taylor linear attention, over the same seeds."""
    rows = _by_seed(read_csv(FOLDER / "reasons.csv"), ("mixer", "norm", "convolution", "precision"))
    ours, theirs = (rows["TaylorLinearAttention", "layernorm", kind, "fp32"] for kind in ("seqarch", "zoology"))
    pairs = [theirs[seed] - ours[seed] for seed in ours.keys() & theirs]
    return f"{np.mean(pairs):+.3f} ± {STUDENT * float(np.std(pairs, ddof=1)) / len(pairs) ** 0.5:.3f}"


def key_conv() -> Table:
    """The mean accuracy over the seeds with its range, without and with a convolution over three keys."""
    found = _by_seed(read_csv(FOLDER / "key_conv.csv"), ("selection", "chunk_size", "key_conv"))
    table = [["selection", "chunk size", "without convolution", "`key_conv` 3"]]
    for selection, size in (("exact", "8"), ("approx", "8"), ("approx", "4")):
        both = [found[selection, size, kernel] for kernel in ("0", "3")]
        table.append([selection, size, *(f"{np.mean([*own.values()]):.3f} ({_span(own)})" for own in both)])
    return table


def _by_seed(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> dict[tuple[str, ...], dict[str, float]]:
    """The accuracy of each seed, by the values of some columns, in order of appearance."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), {})[row["seed"]] = float(row["accuracy"])
    return found


def _span(own: Mapping[str, float]) -> str:
    return f"{min(own.values()):.3f} to {max(own.values()):.3f}"
