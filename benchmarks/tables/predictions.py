"""Scores predictions that were written down before the runs that test them (`benchmarks/predictions.csv`).

A row predicts that a quantity of a model lies between `low` and `high`:

gap          to the reference's run of the same seed
gap_110m     the same at 110M parameters
in_domain    loss, `minus` that of seed 0 of another model where the row names one
ood          the same
best_rate    the rate of the ladder with the lowest in-domain loss
flips        pairs of models whose gaps change order with a variant of both, such as `canon_mamba2` for `mamba2`
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

from benchmarks.tables.results import REFERENCE, RESULTS, SMALL
from seqarch.tables import read_csv, readable

WRITTEN = Path(__file__).parents[1] / "predictions.csv"
GAPS = {"gap": "fourteen", "gap_110m": "medium"}
"""The folder of the results that has a kind of gap."""


@cache
def _losses() -> dict[tuple[str, str, str], dict[str, str]]:
    """The finished models by model, seed and tokens."""
    rows = read_csv(RESULTS / "fourteen/losses.csv")
    return {(row["model"], row["seed"], row["tokens"]): row for row in rows}


def measured(row: dict[str, str]) -> float | None:
    """What the runs gave for a prediction; `None` before they ran."""
    model, seed, tokens = row["model"], row["seed"], row["tokens"]
    if row["quantity"] == "best_rate":
        rungs = [one for (name, _, at), one in _losses().items() if name.startswith(f"{model}-") and at == tokens]
        return float(min(rungs, key=lambda rung: float(rung["in_domain"]))["rate"]) if rungs else None
    if row["quantity"] == "flips":
        return _flips(model, _gaps("gap", seed, tokens))
    if row["quantity"] in GAPS:
        return _gaps(row["quantity"], seed, tokens).get(model)
    if (model, seed, tokens) not in _losses():
        return None
    loss = float(_losses()[model, seed, tokens][row["quantity"]])
    return loss - (float(_losses()[row["minus"], "0", tokens][row["quantity"]]) if row["minus"] else 0)


def _gaps(kind: str, seed: str, tokens: str) -> dict[str, float]:
    """The gaps by model."""
    path = RESULTS / GAPS[kind] / "pairs.csv"
    pairs = read_csv(path) if path.is_file() else []
    return {pair["model"]: float(pair["gap"]) for pair in pairs if (pair["seed"], pair["tokens"]) == (seed, tokens)}


def _flips(variant: str, gaps: dict[str, float]) -> float | None:
    """Pairs of models in another order with their variants; `None` before all variants that are predicted ran."""
    prefix = f"{variant}_"
    models = {row["model"].removeprefix(prefix) for row in read_csv(WRITTEN) if row["model"].startswith(prefix)}
    if not all(prefix + model in gaps for model in models):
        return None
    gaps = {"transformer_pp": 0.0, **gaps}  # the reference has no gap to itself
    pairs = itertools.combinations(sorted(models), 2)
    return sum((gaps[a] < gaps[b]) != (gaps[prefix + a] < gaps[prefix + b]) for a, b in pairs)


def canon() -> list[list[str]]:
    """In-domain loss, gap to the reference and what copying saves, without and with Canon layers; seed 0."""
    gaps = {REFERENCE: 0.0, **_gaps("gap", "0", str(SMALL))}
    table = [["model", "in-domain loss", "with Canon", "gap", "with Canon", "copying saves", "with Canon"]]
    for model in sorted((name for name in gaps if f"canon_{name}" in gaps), key=gaps.__getitem__):
        pair = (model, f"canon_{model}")
        losses = [_losses()[name, "0", str(SMALL)] for name in pair]
        in_domain, copying = ([float(row[key]) for row in losses] for key in ("in_domain", "copying"))
        cells = [f"{loss:.3f}" for loss in in_domain] + [f"{gaps[name]:+.3f}" for name in pair]
        table.append([f"`{model}`", *cells, *(f"{saved:.2f}" for saved in copying)])
    return table


def score(row: dict[str, str]) -> str:
    """Whether a prediction holds."""
    if (value := measured(row)) is None:
        return "not run yet"
    return "yes" if float(row["low"]) <= value <= float(row["high"]) else "no"


def predictions_failed() -> list[list[str]]:
    """Each prediction that does not hold, with what was measured."""
    table = [["quantity", "model", "tokens", "predicted", "measured"]]
    for row in read_csv(WRITTEN):
        if score(row) == "no":
            number = "{:.2e}" if row["quantity"] == "best_rate" else "{:+.3f}"
            low, high = (number.format(float(row[key])) for key in ("low", "high"))
            quantity = row["quantity"] + (f" minus that of {row['minus']}" if row["minus"] else "")
            about = [quantity, f"`{row['model']}`", readable(int(row["tokens"]))]
            table.append([*about, low if low == high else f"{low} to {high}", number.format(measured(row))])
    return table


def predictions_held() -> str:
    scores = [score(row) for row in read_csv(WRITTEN)]
    return f"{scores.count('yes')} of {len(scores) - scores.count('not run yet')}"
