"""The figure of a recall exam: accuracy against the elements of state, with published points.

`published.csv` holds the points of the figure in Zoology's README (github.com/HazyResearch/zoology, MQAR of Based),
read to +-0.02. That figure's axis counts four times the elements (`_compute_state_size` of zoology/model.py), and for
RWKV-7 the square of the width. `elements` are those of the same configurations: the mixer's state, without that of
short convolutions in it, and 3 values per channel of the convolution before it. Our points count those convolutions,
and 2 values per channel.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqarch.errors import one_of
from seqarch.report.panels import WIDTH, Picture, log_axis, own_style, save
from seqarch.report.styles import styles
from seqarch.runs.files import replaced
from seqarch.tables import read_csv, write_csv

COLUMNS = ("mixer", "class", "options", "width", "state_elements", "accuracy", "rate", "epochs", "seconds", "finished")


def published(settings: Mapping[str, Any]) -> list[dict[str, str]]:
    """The published points of a task at a size, one row per point; there are some of MQAR at size small."""
    known = (settings["task"], settings["size"]) == ("mqar", "small")
    return read_csv(Path(__file__).parent / "published.csv") if known else []


def published_accuracy(point: Mapping[str, Any]) -> float | None:
    """The published accuracy of a point of MQAR with the same mixer, width and options; `None` if there is none."""
    for row in published(point["settings"]):
        option, _, value = row["option"].partition("=")
        same = str(point["options"].get(option)) == value if option else not point["options"].get("window")
        if (row["class"], row["width"]) == (point["class"], str(point["width"])) and same:
            return float(row["accuracy"])
    return None


def draw(points: Sequence[Mapping[str, Any]], stem: Path) -> None:
    """Write the points as `stem`.csv and draw them as `stem`.png and .svg."""
    shown = [point for point in points if point["state_elements"]]
    with own_style(), replaced(stem.parent) as new:
        write_csv(new / f"{stem.name}.csv", COLUMNS, [[_cell(point[name]) for name in COLUMNS] for point in points])
        if shown:
            save({stem.name: recall_figure(shown)}, new)


def _cell(value: Any) -> Any:
    return " ".join(f"{name}={each}" for name, each in value.items()) if isinstance(value, Mapping) else value


def recall_figure(points: Sequence[Mapping[str, Any]]) -> Picture:
    """Accuracy against state size: a line per mixer. Published points are hollow and dotted.

    A ring marks a point that ended before its last epoch, so before its learning rate had fallen to zero.
    """
    figure = Picture(figsize=(WIDTH, 0.6 * WIDTH), layout="constrained")
    axes = figure.subplots()
    settings = points[0]["settings"]
    # Only of `Attention` is a window a model of its own: `Based` has an option of this name too.
    found = [(p["class"], p["class"] == "Attention" and bool(p["options"].get("window")), p, False) for p in points]
    found += [(row["class"] or row["model"], "window" in row["option"], row, True) for row in published(settings)]
    lines: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    kinds = {}
    for kind, window, each, hollow in found:
        name = f"{kind}, window" if window else kind
        kinds[name] = "window_64" if window else kind
        elements = each["elements" if hollow else "state_elements"]
        lines.setdefault((name, hollow), []).append((float(elements), float(each["accuracy"])))
    looks = styles(kinds)
    for (name, hollow), line in lines.items():
        style = dataclasses.replace(looks[name], hollow=hollow).line(label=name + ", published" * hollow)
        style |= {"linestyle": ":", "linewidth": 0.8, "zorder": 1.5} if hollow else {}
        axes.plot(*zip(*sorted(line), strict=True), **style)
    if stopped := [(each["state_elements"], each["accuracy"]) for each in points if not each["finished"]]:
        axes.plot(*zip(*stopped, strict=True), "o", ms=10, mfc="none", mec="#555555", mew=0.7, label="stopped early")
    log_axis(axes)
    axes.set_ylim(-0.02, 1.03)
    lengths = one_of([f"{length:,}" for length in sorted({each["test_length"] for each in points})])
    axes.set_xlabel(f"state of all layers at {lengths} tokens (elements)")
    axes.set_ylabel("mean accuracy in the test")
    epochs = one_of([str(most) for most in sorted({each["settings"]["epochs"] for each in points})])
    axes.set_title(f"{settings['task']}, setting {settings['size']}, at most {epochs} epochs")
    figure.legend(loc="outside right center", fontsize=8)
    return figure
