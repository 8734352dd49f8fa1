"""The tables and numbers of docs/results, from the CSV files that `benchmarks/budget_tables.py` writes there."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.budget_tables import rank_correlation
from seqarch.tables import read_csv, readable

RESULTS = Path(__file__).parents[2] / "docs/results"
REFERENCE = "transformer_pp"
SMALL, LONG = 340131840, 1020395520
"""Tokens of the size `small`, and three times as many."""
DOMAINS = ("arxiv", "github", "speech", "stack", "wiki")
PAPER = {
    **dict.fromkeys(("transformer", "top1_element", "top1_chunk", "top1_chunk_approx"), "equal"),
    **dict.fromkeys(("window_64", "window_128", "window_256", "based", "mamba1", "mamba2"), "worse"),
    **dict.fromkeys(("rwkv5", "rwkv6", "rwkv7", "delta_net", "gated_delta_net"), "worse"),
}
"""What arXiv 2505.18522 finds for each model against Transformer++ at 2,048 tokens."""
Table = list[list[str]]


@cache
def gaps(folder: str) -> dict[tuple[str, int, str], dict[str, str]]:
    """The rows of a folder's gaps by model, tokens and domain."""
    rows = read_csv(RESULTS / folder / "gaps.csv")
    return {(row["run"], int(row["tokens"]), row["domain"]): row for row in rows if row["tokens"]}


@cache
def ends(folder: str, model: str, tokens: int) -> dict[str, float]:
    """The mean losses of a model's seeds after these tokens; empty if it has none."""
    rows = read_csv(RESULTS / folder / "losses.csv")
    own = [row for row in rows if (row["model"], int(row["tokens"])) == (model, tokens)]
    keys = [key for key in rows[0] if key not in ("model", "seed") and all(row[key] for row in own)]
    return {key: float(np.mean([float(row[key]) for row in own])) for key in keys} if own else {}


def models() -> list[str]:
    """The architectures with a gap at 340M tokens, the best first; without the reference."""
    found = {model for model, tokens, _ in gaps("fourteen") if tokens == SMALL and model in PAPER}
    return sorted(found, key=lambda model: raw(model))


def raw(model: str, domain: str = "mean, raw", tokens: int = SMALL) -> float:
    return float(gaps("fourteen")[model, tokens, domain]["gap"])


def cell(row: dict[str, str] | None) -> str:
    """A gap with half of its interval, where it has one."""
    if row is None:
        return "-"
    text = f"{float(row['gap']):+.3f}"
    half = (float(row["high"]) - float(row["low"])) / 2 if row.get("low") else math.inf
    return f"{text} ± {half:.3f}" if math.isfinite(half) else text


def gap(model: str, tokens: str = "340M", *domain: str) -> str:
    """A gap of the fourteen, as `cell`; by default the raw mean of the domains."""
    where = " ".join(domain) or "mean, raw"
    rows = gaps("fourteen")
    return cell(next(rows[key] for key in rows if (key[0], readable(key[1]), key[2]) == (model, tokens, where)))


def highest(model: str) -> str:
    """The upper end of the interval of a gap at 340M tokens."""
    return f"{float(gaps('fourteen')[model, SMALL, 'mean, raw']['high']):+.3f}"


def value_of(model: str) -> str:
    """The gap of a model at 340M tokens without its interval, for comparisons of single runs."""
    return f"{raw(model):+.3f}"


@cache
def verdicts() -> dict[str, str]:
    """The word of the verdict on each model at 340M tokens."""
    return {row["model"]: row["word"] for row in read_csv(RESULTS / "fourteen/settled.csv")}


def fourteen() -> Table:
    """The gaps: one row for each architecture of the paper's figures 1(b) and 6(a)."""
    head = ["model", "the paper", "pairs", "gap at 340M", "verdict"]
    table = [[*head, "recallable tokens", "other tokens", "copying saves", "tokens, ratio", "time, ratio"]]
    names, standings = models(), {row["run"]: row for row in read_csv(RESULTS / "fourteen/standings.csv")}
    better = sum(raw(model) < 0 for model in names)
    rows = gaps("fourteen")
    for model in (*names[:better], REFERENCE, *names[better:]):
        saved = copying(model)
        if model == REFERENCE:
            table.append([f"`{model}`", "", "", "0", "", "", "", saved, "1", "1"])
            continue
        one = rows[model, SMALL, "mean, raw"]
        own, *parts = (cell(rows[model, SMALL, f"mean, {of}"]) for of in ("raw", "recallable tokens", "other tokens"))
        ratios = (f"{float(standings[model][key]):.2f}" for key in ("tokens_ratio", "time_ratio"))
        row = [PAPER[model], one["pairs"], own, verdicts()[model], *parts, saved, *ratios]
        table.append([f"`{model}`", *(each.replace("± ", "±") for each in row)])
    return table


def settled() -> str:
    """How many of the gaps at 340M tokens are settled."""
    words = [verdicts()[model] for model in models()]
    return f"{len(words) - words.count('not settled')} of {len(words)}"


def order_by_domain() -> str:
    """The rank correlation of the gaps of each domain with the raw means."""
    means = [0.0, *(raw(model) for model in models())]
    found = [rank_correlation([0.0, *(raw(model, domain) for model in models())], means) for domain in DOMAINS]
    return f"{min(found):.2f} to {max(found):.2f}"


def order_by_copying() -> str:
    """The rank correlation of the gaps with what copying saves."""
    names = models()
    saved = [ends("fourteen", model, SMALL)["copying"] for model in (REFERENCE, *names)]
    return f"{rank_correlation([0.0, *map(raw, names)], saved):.2f}"


def copying(model: str) -> str:
    """Nats per token that copying saves after 340M tokens."""
    return f"{ends('fourteen', model, SMALL)['copying']:.2f}"


def drafts(*studies: str) -> Table:
    """The short runs of some studies."""
    table = [["model", "in-domain loss", "OOD loss", "gap [95 % interval]"]]
    for row in read_csv(RESULTS / "drafts.csv"):
        if row["study"] in studies:
            name = f"`{row['run']}`" + (f", {row['seeds']} seeds" if row["seeds"] != "1" else "")
            number, low, high = (f"{float(row[key]):+.3f}" for key in ("gap", "low", "high"))
            losses = [f"{float(row[key]):.3f}" for key in ("in_domain", "ood")]
            table.append([name, *losses, f"{number} [{low}, {high}]"])
    return table


def order_during_training() -> str:
    """The rank correlation of the gaps with those during training, which are the paper's kind of gap."""
    standings = read_csv(RESULTS / "fourteen/standings.csv")
    rows = [row for row in standings if row["run"] in PAPER and row["gap_during_training"]]
    both = [[float(row[key]) for row in rows] for key in ("gap", "gap_during_training")]
    return f"{rank_correlation(*both):.2f} ({len(rows)} models)"
