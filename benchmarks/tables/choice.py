"""Which architecture should one take? The needs, and the figures of the gap, also against recall.

python -m benchmarks.tables.choice       # draws docs/results/fourteen/gaps and recall, as PNG and SVG
"""

from __future__ import annotations

import json
from functools import cache

from benchmarks.tables.results import PAPER, REFERENCE, RESULTS, SMALL, gaps, models, raw
from seqarch.report.panels import Picture, own_style, write
from seqarch.report.styles import styles
from seqarch.scale.decisions import Accuracy, accuracies
from seqarch.tables import read_csv

RECALLED = {
    **{"transformer_pp": "Attention", "window_64": "Attention, window", "based": "Based", "mamba2": "Mamba2"},
    **{
        "rwkv5": "RWKV5",
        "rwkv6": "RWKV6",
        "rwkv7": "RWKV7",
        "delta_net": "DeltaNet",
        "gated_delta_net": "GatedDeltaNet",
    },
    **{"top1_chunk": "Top1Chunk", "top1_element": "Top1Element"},
}
"""The mixer of the recall exam that stands for each language model."""
DECODED = ("64", "50000")
"""Batch and prompt of the decoding speeds."""
Table = list[list[str]]


@cache
def recalled() -> dict[str, float]:
    """The accuracy of each model's mixer on MQAR; the narrowest width counts."""
    points = json.loads((RESULTS / "recall/mqar.json").read_text(encoding="utf-8"))["points"]
    found: dict[str, float] = {}
    for point in sorted(points, key=lambda point: -point["width"]):
        window = point["class"] == "Attention" and point["options"].get("window")
        found[f"{point['class']}, window" if window else point["class"]] = point["accuracy"]
    return {model: found[kind] for model, kind in RECALLED.items() if kind in found}


@cache
def standings() -> dict[str, dict[str, str]]:
    return {row["run"]: row for row in read_csv(RESULTS / "fourteen/standings.csv")}


@cache
def state_shares() -> dict[str, float]:
    """The state of each model as a share of full attention's cache."""
    rows = {row["model"]: float(row["state_elements"]) for row in read_csv(RESULTS / "fourteen/states.csv")}
    return {model: elements / rows[REFERENCE] for model, elements in rows.items()}


@cache
def decoded() -> dict[str, float]:
    """Tokens per second of decoding by the models of 110M parameters."""
    rows = read_csv(RESULTS.parents[1] / "benchmarks/generation_h200.csv")
    chosen = (row for row in rows if row["of"] == "seqarch" and (row["batch_size"], row["prompt"]) == DECODED)
    return {row["name"].removesuffix("_110m"): float(row["decode_tokens_per_s"]) for row in chosen}


def _gap(model: str) -> float:
    return 0.0 if model == REFERENCE else raw(model)


def needs() -> Table:
    """For each need the models that serve it best."""
    names = [model for model in models() if model in standings()]
    tokens, time = ({name: float(standings()[name][key]) for name in names} for key in ("tokens_ratio", "time_ratio"))
    close = [name for name in names if raw(name) <= 0.05]
    small = [name for name in state_shares() if name in names and state_shares()[name] < 0.1]
    return [
        ["need", "take", "because"],
        ["unseen text", _named(close), "their gap to Transformer++ is at most 0.05 nats"],
        ["recall", _named([name for name, each in recalled().items() if each > 0.95]), "they recall more than 95 %"],
        _lowest("few training tokens", tokens, "{:.2f} times the tokens of Transformer++ for the same loss"),
        _lowest("little training time", time, "{:.2f} times the time of Transformer++ for the same loss"),
        [
            "a small state",
            _named(sorted(small, key=_gap)[:1]),
            "the lowest gap of the models with less than 10 % of the cache",
        ],
        _lowest(
            "fast decoding", {name: -each for name, each in decoded().items()}, "{:,.0f} tokens per second after 50,000"
        ),
    ]


def _lowest(need: str, numbers: dict[str, float], why: str) -> list[str]:
    best = min(numbers, key=lambda name: numbers[name])
    return [need, f"`{best}`", why.format(abs(numbers[best]))]


def _named(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def recall_and_gap() -> str:
    """The rank correlation of recall with the gap, with its interval over the models."""
    found = _against_recall()
    low, high = -found.rank_correlation_high, -found.rank_correlation_low
    return f"{-found.rank_correlation:.2f} ({low:.2f} to {high:.2f}; {found.models} models)"


def _against_recall() -> Accuracy:
    """Whether models that miss more of the recall exam have a larger gap."""
    missed = {model: [1 - accuracy] for model, accuracy in recalled().items()}
    (found,) = accuracies({"recall": missed, "gap": {model: [_gap(model)] for model in missed}})
    return found


def figure() -> Picture:
    """The gap of each model over the accuracy of its mixer in the recall exam."""
    looks = styles({model: model for model in recalled()})
    with own_style():
        picture = Picture(figsize=(5.4, 3.7), layout="constrained")
        axes = picture.subplots()
        axes.axhline(0, color="#777777", linewidth=0.8)
        for model, accuracy in recalled().items():
            style = looks[model].line(linestyle="none", markersize=8)
            picture.plot(axes, model, [accuracy], [_gap(model)], **style)
            x, side = (-6, "right") if model in ("based", "mamba2") else (6, "left")  # a neighbour is on the right
            at = (accuracy, _gap(model))
            axes.annotate(model, at, xytext=(x, 4), textcoords="offset points", ha=side, fontsize=8)
        axes.set_xlim(0.48, 1.09)
        axes.set_xlabel("accuracy in the recall exam (MQAR)")
        axes.set_ylabel("gap at 340M tokens, nats per token")
    return picture


def gap_figure() -> Picture:
    """The gap of each architecture with its 95 % interval, the best on top; hollow with one pair of seeds."""
    names = models()[::-1]
    looks = styles({model: model for model in names})
    with own_style():
        picture = Picture(figsize=(5.4, 3.9), layout="constrained")
        axes = picture.subplots()
        axes.axvline(0, color="#777777", linewidth=0.8)
        for row, model in enumerate(names):
            own = gaps("fourteen")[model, SMALL, "mean, raw"]
            gap, low, high = (float(own[key]) for key in ("gap", "low", "high"))
            color = looks[model].colour
            face = "white" if own["pairs"] == "1" else color
            axes.plot([low, high], [row, row], color=color, linewidth=2.2, alpha=0.45, solid_capstyle="butt")
            axes.plot(gap, row, "o", color=color, markerfacecolor=face, markersize=6, markeredgewidth=1.5)
        axes.set_yticks(range(len(names)), [f"{name}  ({PAPER[name]})" for name in names])
        axes.set_xlabel("gap at 340M tokens, nats per token; left is better")
        axes.grid(visible=False, axis="y")
    return picture


if __name__ == "__main__":
    for name, drawn in (("recall", figure()), ("gaps", gap_figure())):
        write(drawn, RESULTS / f"fourteen/{name}")
