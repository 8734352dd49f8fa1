"""Predictions that a summary writes down before the runs that test them: OUT/predictions.csv.

A row says which of two models has the lower loss at the next rung. It is written once, and scored as soon as a larger
rung has both models.
"""

import datetime
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from seqarch.errors import UserError
from seqarch.scale.decisions import Rungs, accuracies, ranked_pairs
from seqarch.tables import read_csv, write_csv

FILE = "predictions.csv"
COLUMNS = ("written", "loss", "rung", "better", "worse", "difference", "decided")


@dataclass(frozen=True)
class Prediction:
    """One row, and what came of it.

    Args:
        written: the date.
        loss: which loss.
        rung: the largest rung at that time.
        better: the model that is expected to have the lower loss.
        worse: the other one.
        difference: by how much at `rung`.
        decided: "yes" if pairs with this difference kept their order before, "no" if not, "" if unknown.
        later: the next rung with both models, "" before there is one.
        measured: the difference at that rung.
    """

    written: str
    loss: str
    rung: str
    better: str
    worse: str
    difference: float
    decided: str
    later: str = ""
    measured: float = float("nan")

    @property
    def holds(self) -> bool:
        return self.measured > 0


def register(path: Path, loss: str, rungs: Rungs, known: Collection[str] = ()) -> None:
    """Write down what the largest rung predicts for the next one. Pairs with a prediction from there keep it.

    A pair of `known` models, whose runs of the next rung are finished, gets none.
    """
    *_, last = rungs
    rows = _read(path)
    before = accuracies(rungs)
    decided_from = before[-1].decided_from if before else None
    there = {(row["loss"], row["rung"], frozenset((row["better"], row["worse"]))) for row in rows}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for pair in ranked_pairs(rungs[last]):
        both = frozenset((pair.better, pair.worse))
        if (loss, last, both) not in there and not both <= set(known):
            decided = "" if decided_from is None else "yes" if pair.difference > decided_from else "no"
            row = (today, loss, last, pair.better, pair.worse, f"{pair.difference:.6f}", decided)
            rows.append(dict(zip(COLUMNS, row, strict=True)))
    write_csv(path, COLUMNS, ([row[name] for name in COLUMNS] for row in rows))


def scored(path: Path, loss: str, rungs: Rungs) -> list[Prediction]:
    """The predictions of this loss, each with its score where a larger rung has both models."""
    order = list(rungs)
    predictions = []
    for row in _read(path):
        if row["loss"] != loss:
            continue
        texts = {name: row[name] for name in COLUMNS}
        one = Prediction(**{**texts, "difference": float(row["difference"])})  # pyright: ignore[reportArgumentType]
        later = order[order.index(row["rung"]) + 1 :] if row["rung"] in order else []
        both = next((rung for rung in later if {row["better"], row["worse"]} <= rungs[rung].keys()), None)
        if both is not None:
            better, worse = (float(np.mean(rungs[both][row[name]])) for name in ("better", "worse"))
            one = replace(one, later=both, measured=worse - better)
        predictions.append(one)
    return predictions


def _read(path: Path) -> list[dict[str, str]]:
    rows = read_csv(path) if path.is_file() else []
    if rows and tuple(rows[0]) != COLUMNS:
        raise UserError(f"{path} holds no predictions: its columns must be {', '.join(COLUMNS)}")
    return rows
