"""How the figures of a report lie on the page: no text is clipped, hidden or on another."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import BboxBase

from seqarch.report import Findings
from seqarch.report import figures as drawn
from seqarch.report.draft import Draft
from seqarch.report.findings import ModelGaps
from seqarch.report.panels import STYLE, ReportFigure, frame, log_axis, panels, wrap
from tests.report.runs_for_tests import write_branched, write_capable, write_run


def laid_out(figure: ReportFigure, findings: Findings) -> Any:
    """The picture with every text in its place, `None` if these models have nothing to show."""
    with matplotlib.rc_context(STYLE):
        picture = figure.draw(findings)
        if picture is not None:
            picture.draw_without_rendering()
    return picture


def texts(figure: Figure) -> dict[str, BboxBase]:
    """The boxes of all visible texts of a figure that is laid out. Ticks outside of their axis are not visible."""
    hidden = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in hidden]
    return {f"{i} {text.get_text()}": Text.get_window_extent(text) for i, text in enumerate(dict.fromkeys(shown))}


EVERY = len(drawn.FIGURES) - 1  # all but the figure of `recall_probe`


@pytest.mark.parametrize(("kind", "count"), [("many", 5), ("capable", EVERY), (4, EVERY), (7, EVERY)])
def test_no_text_of_any_figure_is_clipped_or_lies_on_another(kind, count, request, tmp_path):
    """A number as `kind` means so many models, whose names and a domain's take several lines."""
    if isinstance(kind, int):
        gaps = {f"a mixer from another package with a very {'x' * 60} {i} of them": 0.05 * i for i in range(kind)}
        findings = write_capable(tmp_path, gaps, ("a_domain_from_the_web_with_a_long_name", "code", "legal"))
    else:
        findings = request.getfixturevalue(kind)
    pictures = [(figure.name, laid_out(figure, findings)) for figure in drawn.FIGURES]
    pictures = [(name, picture) for name, picture in pictures if picture is not None]
    assert len(pictures) == count
    for name, picture in pictures:
        boxes = texts(picture)
        for text, box in boxes.items():
            assert picture.bbox.padded(0.5).contains(box.x0, box.y0), (name, text)
            assert picture.bbox.padded(0.5).contains(box.x1, box.y1), (name, text)
        for (one, box), (other, its) in combinations(boxes.items(), 2):
            assert not box.padded(-1).overlaps(its), (name, one, other)
        least = 1.1 if name != "gap" else 0.3  # rows of a gap figure are 0.27 inches high
        assert all(axes.bbox.height > least * picture.dpi for axes in picture.axes), name


@pytest.mark.parametrize("count", [5, 12])
def test_a_legend_next_to_a_panel_takes_no_height_from_it(tmp_path, count):
    names = [f"model {i} of a package with {'a very ' * 9}long name" for i in range(count)]
    runs = [write_run(tmp_path / name, name, gap=i / 50) for i, name in enumerate(names)]
    figure = laid_out(drawn.scatter, Findings.read(runs))
    (named,) = (axes for axes in figure.axes if axes.get_legend())
    box = named.get_legend().get_window_extent()
    assert box.y0 > 0
    assert not any(box.overlaps(axes.bbox) for axes in figure.axes)
    assert named.bbox.height > (3.4 if count > 7 else 2.2) * figure.dpi
    assert all(axes.bbox.height > 1.5 * figure.dpi for axes in figure.axes)


def test_the_name_of_the_vertical_axis_does_not_lie_on_the_legend(tmp_path):
    runs = [write_run(tmp_path / f"{i}_{s}", f"model_{i}", gap=i / 50, seed=s) for i in range(7) for s in (0, 1)]
    figure = laid_out(drawn.distance, Findings.read(runs))
    (label,) = (box for text, box in texts(figure).items() if "above" in text)
    assert not figure.legends[0].get_window_extent().overlaps(label)


def test_few_lines_have_their_names_in_the_order_of_their_ends_next_to_a_panel(found, many):
    figure = laid_out(drawn.scatter, found)
    assert not figure.legends
    *_, last = figure.axes
    names = [text.get_text() for text in last.get_legend().get_texts()]
    assert names == ["mamba2", "_top1_$chunk$<b>", "transformer_pp"], "as the lines end"
    assert laid_out(drawn.losses, many).legends


def test_no_tick_of_the_gap_figure_is_clipped(found):
    """The last tick is close to the edge, and its label is long."""
    close = Findings(found.groups, found.reference)
    draft = Draft(dict.fromkeys(close.domains, 0.007), 9, (2.0, 3.0))
    vars(close)["comparisons"] = {group.name: ModelGaps(group, "it", draft=draft) for group in close.others}
    figure = laid_out(drawn.gap, close)
    for axes in figure.axes:
        low, high = axes.get_xlim()
        ticks = [tick.label1 for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        assert all(label.get_window_extent().x1 <= figure.bbox.x1 for label in ticks)
    assert ticks[-1].get_text() == "+0.005"


def test_long_names_break_where_their_parts_meet():
    assert wrap("hybrid_gated_delta_net_attention (3 seeds)", 30) == "hybrid_gated_delta_net_\nattention (3 seeds)"
    assert wrap("x" * 45, 20).split("\n") == ["x" * 20, "x" * 20, "x" * 5]
    assert wrap("short_name", 20) == "short_name"


def test_the_panel_of_finished_models_keeps_its_height_above_many_names(tmp_path):
    heights = []
    for count in (8, 16):
        runs = [tmp_path / f"{count}/{name}" for name in ("transformer_pp", *(f"model_{i}" for i in range(1, count)))]
        for i, run in enumerate(runs):
            write_branched(run, run.name, (200,), gap=0.01 * i)
        figure = laid_out(drawn.budgets, Findings.read(runs))
        boxes = texts(figure)
        (label,) = (box for text, box in boxes.items() if "OOD loss above" in text)
        assert not any(box is not label and box.padded(-1).overlaps(label) for box in boxes.values())
        heights.append(figure.axes[0].get_window_extent().height)
    assert heights[1] == pytest.approx(heights[0], rel=0.1)


@pytest.mark.parametrize("kind", ["found", "many", "capable", "stopped"])
def test_the_note_on_the_identity_line_lies_on_no_curve(kind, request):
    figure = laid_out(drawn.scatter, request.getfixturevalue(kind))
    for axes in figure.axes:
        (note,) = axes.texts
        box = note.get_window_extent()
        for line in axes.lines:
            assert not line.get_transform().transform_path(line.get_path()).intersects_bbox(box, filled=False), note


@pytest.mark.parametrize(("height", "side"), [(3.9, "left"), (1.9, "right"), (1.1, "left"), (0.5, "left")])
def test_the_note_stands_at_the_end_that_the_identity_line_leaves_free(height, side):
    axes = Figure().subplots()
    x = np.linspace(1, 2, 9)
    frame(axes, x, np.linspace(height, height + 1, 9), spare=0.6)
    (note,) = axes.texts
    assert note.get_horizontalalignment() == side
    assert note.get_text() == ("identity line 2.90 nats below" if height == 3.9 else "dashed: identity")
    assert axes.get_ylim()[0] < height


@pytest.mark.parametrize(("marks", "shown"), [(range(1, 61), 7), ([1, 7, 30, 60], 4), (None, 7)])
def test_numbers_on_a_logarithmic_axis_do_not_touch(marks, shown):
    figure, (axes,) = panels(1)
    axes.plot([1, 60 if marks else 1e15], [0, 1])
    log_axis(axes, marks)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(left.x1 + 3 < right.x0 for left, right in pairwise(boxes))
    assert len(boxes) >= shown
    assert axes.get_xticks()[-1] == (60 if marks else 3e15), "the largest one in view"


def test_the_reason_for_no_gap_stays_in_its_panel_next_to_negative_gaps(tmp_path):
    runs = [write_run(tmp_path / name, name, gap=gap) for name, gap in (("pp", 0.0), ("a", -1.0), ("b", -2.0))]
    runs.append(write_run(tmp_path / "slow", "slow", speed=0.01))
    axes = laid_out(drawn.gap, Findings.read(runs)).axes[0]
    (text,) = axes.texts
    box = text.get_window_extent()
    assert axes.bbox.x0 < box.x0
    assert box.x1 < axes.bbox.x1
