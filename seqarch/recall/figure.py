"""The figure of a recall exam: accuracy against the elements of state, with published points.

`published.csv` holds the points of the figure in Zoology's README (github.com/HazyResearch/zoology, MQAR of Based),
read to +-0.02. That figure's axis counts four times the elements (`_compute_state_size` of zoology/model.py), and for
RWKV-7 the square of the width. `elements` are those of the same configurations: the mixer's state, and 3 values per
channel of the convolution before it.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from seqarch.report.panels import STYLE, WIDTH, save
from seqarch.report.styles import COLOURS, FAMILIES, MARKERS
from seqarch.tables import write_csv

COLUMNS = ("mixer", "class", "options", "width", "state_elements", "accuracy", "rate", "epochs", "seconds", "finished")


def published() -> list[dict[str, str]]:
    """The published points of MQAR, a row each."""
    with (Path(__file__).parent / "published.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def published_accuracy(point: Mapping[str, Any]) -> float | None:
    """The published accuracy of a point of MQAR with the same mixer, width and options; `None` if there is none."""
    if (point["settings"]["task"], point["settings"]["size"]) != ("mqar", "small"):
        return None
    for row in published():
        option, _, value = row["option"].partition("=")
        same = str(point["options"].get(option)) == value if option else not point["options"].get("window")
        if (row["class"], row["width"]) == (point["class"], str(point["width"])) and same:
            return float(row["accuracy"])
    return None


def draw(points: Sequence[Mapping[str, Any]], stem: Path) -> None:
    """Write the points as `stem`.csv and draw them as `stem`.png and .svg."""
    write_csv(stem.with_suffix(".csv"), COLUMNS, [[_cell(point[name]) for name in COLUMNS] for point in points])
    shown = [point for point in points if point["state_elements"]]
    if shown:
        with matplotlib.rc_context(STYLE):
            save(recall_figure(shown), stem)


def _cell(value: Any) -> Any:
    return " ".join(f"{name}={each}" for name, each in value.items()) if isinstance(value, Mapping) else value


def recall_figure(points: Sequence[Mapping[str, Any]]) -> Figure:
    """Accuracy against state size: a line per mixer, a colour per family; published points are hollow and dotted."""
    figure = Figure(figsize=(WIDTH, 0.6 * WIDTH), layout="constrained")
    axes = figure.subplots()
    families: dict[str, str] = {}

    def look(kind: str, marker: str) -> dict[str, Any]:
        family = FAMILIES.get(kind, kind)
        colour = families.setdefault(family, COLOURS[len(families) % len(COLOURS)])
        return {"color": colour, "marker": marker}

    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for point in points:
        kind = point["class"]
        label = f"{kind}, window" if point["options"].get("window") else kind
        groups.setdefault((kind, label), []).append((point["state_elements"], point["accuracy"]))
    markers: dict[str, str] = {}
    for (kind, label), line in groups.items():
        markers.setdefault(kind, MARKERS[len(markers) % len(MARKERS)])
        axes.plot(*zip(*sorted(line), strict=True), label=label, **look(kind, markers[kind]))
    settings = points[0]["settings"]
    if settings["task"] == "mqar" and settings["size"] == "small":
        rows = published()
        for model in dict.fromkeys(row["model"] for row in rows):
            chosen = [row for row in rows if row["model"] == model]
            kind = chosen[0]["class"] or model
            line = sorted((float(row["elements"]), float(row["accuracy"])) for row in chosen)
            style = {**look(kind, markers.get(kind, "d")), "markerfacecolor": "white", "linestyle": ":"}
            axes.plot(*zip(*line, strict=True), label=f"{model}, published", linewidth=0.8, **style)
    axes.set_xscale("log")
    axes.set_ylim(-0.02, 1.03)
    axes.set_xlabel(f"elements of state of all layers at {points[0]['test_length']:,} tokens")
    axes.set_ylabel("accuracy, mean of the test")
    axes.set_title(f"{settings['task']}, setting {settings['size']}, {settings['epochs']} epochs at most")
    figure.legend(loc="outside right center", fontsize=7)
    return figure
