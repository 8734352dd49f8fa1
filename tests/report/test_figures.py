"""What the figures of a report contain, for few runs and for many."""

from __future__ import annotations

import csv
from dataclasses import asdict, replace
from itertools import combinations, pairwise
from pathlib import Path
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
from seqarch.report.panels import STYLE, frame, log_axis, wrap
from seqarch.report.panels import panels as new_panels
from seqarch.report.roles import HOLD_OUT, OOD
from seqarch.report.runs import load_run
from seqarch.runs.folder import branch_path
from tests.report.runs_for_tests import write_run
from tests.report.test_capabilities import write as write_samples

MANY = {
    "rwkv5": ("RWKV5", 0.12),
    "top1_chunk": ("Top1Chunk", -0.03),
    "mamba1": ("Mamba1", 0.06),
    "transformer_pp": ("Attention", 0.0),
    "mamba2": ("Mamba2", 0.09),
    "window_64": ("Attention", 0.03),
    "rwkv7": ("RWKV7", 0.075),
    "hybrid_gated_delta_net_attention_of_one_layer": ("GatedDeltaNet", 0.015),
    "slow": ("Based", 0.0),
}
"""Class of the mixer and gap."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write_run(folder / "pp", "transformer_pp"),
        write_run(folder / "top1", "_top1_$chunk$<b>", gap=0.05, speed=0.9),
        write_run(folder / "mamba", "mamba2", gap=0.1, layers=0),
    ]
    return Findings.read(runs)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    folder = tmp_path_factory.mktemp("many")
    runs: list[Path] = []
    for name, (kind, gap) in MANY.items():
        options = {"gap": gap, "speed": 0.01 if name == "slow" else 1.0, "facts": {"mixers": {"mixer": kind}}}
        runs += [write_run(folder / f"{name}_{s}", name, seed=s, **options) for s in range(1 + (name == "mamba2"))]
    return Findings.read(runs, "transformer_pp")


def panels(figure) -> dict[str, matplotlib.axes.Axes]:  # pyright: ignore[reportAttributeAccessIssue]
    return {axes.get_title(loc="left") or axes.get_title(): axes for axes in figure.axes}


def test_scatter_draws_each_run_in_each_panel_with_the_identity_line(found):
    shown = panels(drawn.scatter.draw(found))
    assert list(shown) == ["code", "legal", "mean of domains"]
    for domain, axes in zip(("code", "legal", "mean"), shown.values(), strict=True):
        curves = {tuple(line.get_ydata()) for line in axes.lines}
        assert all(tuple(group.evaluations[0].with_mean()[domain]) in curves for group in found.groups)
        identity = [line for line in axes.lines if list(line.get_xdata()) == list(line.get_ydata())]
        assert len(identity) == 1
        left, right = axes.get_xlim()
        assert left > right, "training should run to the right"
        assert right < min(group.evaluations[0].in_domain.min() for group in found.groups)


def test_distances_are_those_to_the_reference(found):
    figure = drawn.distance.draw(found)
    assert figure is not None
    means = [np.mean(line.get_ydata()) for line in panels(figure)["code"].lines[:-1]]
    assert means == pytest.approx([0.05, 0.1], abs=0.01)
    assert drawn.distance.draw(Findings(found.groups[:1], found.reference)) is None


def test_entropy_has_a_line_for_each_layer_and_a_panel_for_each_run_that_logged_it(found):
    figure = drawn.entropy.draw(found)
    assert figure is not None
    with_entropy = [axes for axes in figure.axes if axes.lines]
    assert [len(axes.lines) for axes in with_entropy] == [4, 4]
    assert drawn.entropy.draw(Findings(found.groups[2:], found.groups[2])) is None


def test_implied_entropy_is_drawn_apart(tmp_path):
    runs = [
        write_run(tmp_path / "rwkv7", "rwkv7", entropy_tag="implied_entropy"),
        write_run(tmp_path / "softmax", "softmax"),
    ]
    found = Findings.read(runs)
    for implied, name in ((False, "softmax"), (True, "rwkv7")):
        figure = (drawn.implied_entropy if implied else drawn.entropy).draw(found)
        assert figure is not None
        drawn_panels = [axes for axes in figure.axes if axes.lines]
        assert [axes.get_title() for axes in drawn_panels] == [name]
        assert ("implied" in figure.get_supylabel()) == implied


def texts(figure) -> dict[str, BboxBase]:
    """The boxes of all visible texts, by text. Ticks outside of their axis are not visible."""
    figure.draw_without_rendering()
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


def write_capable(folder: Path, names: dict[str, float], domains: tuple[str, ...] = ("code", "legal")) -> Findings:
    """Models with everything that a figure can show, by their gaps."""
    runs = []
    for number, (name, gap) in enumerate(names.items()):
        tag, facts = "implied_entropy" if gap else "entropy", {"state_elements": 90_000 * 4**number}
        run = write_run(folder / f"{number}", name, gap=gap, entropy_tag=tag, facts=facts, domains=domains)
        for steps in (100, 200):
            write_run(branch_path(run, steps), name, gap=gap, steps=steps, domains=domains)
        for length in (8192, 65536):
            found = {f"passkey/{length}/contains": np.ones(50), "depth": np.linspace(0, 1, 50)}
            write_samples(run, f"passkey_{length}", found, group="passkey", settings={"length": length})
        ranges = ("0-2048", "2048-8192", "8192-16384", "16384-32768", "32768-65536")
        losses = {f"loss_by_position/{d}/{each}": np.array([3, 2.9 + gap]) for d in ("books", "law") for each in ranges}
        write_samples(run, "long", losses, group="long")
        runs.append(run)
    return Findings.read(runs)


@pytest.fixture(scope="module")
def capable(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    gaps = {"transformer_pp": 0.0, "a_mixer_from_another_package_with_a_long_name": 0.1}
    return write_capable(tmp_path_factory.mktemp("capable"), gaps)


EVERY = len(drawn.FIGURES) - 1  # all but the figure of `recall_probe`


@pytest.mark.parametrize(("kind", "count"), [("many", 5), ("capable", EVERY), (4, EVERY), (7, EVERY)])
def test_no_text_of_any_figure_is_clipped_or_lies_on_another(kind, count, request, tmp_path):
    """A number as `kind` means so many models, whose names and a domain's take several lines."""
    if isinstance(kind, int):
        gaps = {f"a mixer from another package with a very {'x' * 60} {i} of them": 0.05 * i for i in range(kind)}
        findings = write_capable(tmp_path, gaps, ("a_domain_from_the_web_with_a_long_name", "code", "legal"))
    else:
        findings = request.getfixturevalue(kind)
    with matplotlib.rc_context(STYLE):
        pictures = {figure.name: figure.draw(findings) for figure in drawn.FIGURES}
        drawn_ones = {name: picture for name, picture in pictures.items() if picture is not None}
        assert len(drawn_ones) == count
        for name, picture in drawn_ones.items():
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
    with matplotlib.rc_context(STYLE):
        runs = [write_run(tmp_path / name, name, gap=i / 50) for i, name in enumerate(names)]
        figure: Any = drawn.scatter.draw(Findings.read(runs))
        figure.draw_without_rendering()
    (named,) = (axes for axes in figure.axes if axes.get_legend())
    box = named.get_legend().get_window_extent()
    assert box.y0 > 0
    assert not any(box.overlaps(axes.bbox) for axes in figure.axes)
    assert named.bbox.height > (3.4 if count > 7 else 2.2) * figure.dpi
    assert all(axes.bbox.height > 1.5 * figure.dpi for axes in figure.axes)


def test_the_name_of_the_vertical_axis_does_not_lie_on_the_legend(tmp_path):
    runs = [write_run(tmp_path / f"{i}_{s}", f"model_{i}", gap=i / 50, seed=s) for i in range(7) for s in (0, 1)]
    with matplotlib.rc_context(STYLE):
        figure: Any = drawn.distance.draw(Findings.read(runs))
        (label,) = (box for text, box in texts(figure).items() if "above" in text)
    assert not figure.legends[0].get_window_extent().overlaps(label)


def test_few_lines_have_their_names_in_the_order_of_their_ends_next_to_a_panel(found, many):
    with matplotlib.rc_context(STYLE):
        figure: Any = drawn.scatter.draw(found)
        assert not figure.legends
        *_, last = figure.axes
        names = [text.get_text() for text in last.get_legend().get_texts()]
        assert names == ["mamba2", "_top1_$chunk$<b>", "transformer_pp"], "as the lines end"
        over_time: Any = drawn.losses.draw(many)
        assert over_time.legends


ORDER = [
    *("top1_chunk", "transformer_pp", "hybrid_gated_delta_net_attention_of_one_layer", "window_64", "mamba1", "rwkv7"),
    *("mamba2", "rwkv5", "slow"),
]
"""The best first; `slow` has no gap."""


def test_runs_are_ranked_by_gap_with_the_reference_at_zero(many):
    assert [group.name for group in many.ranked] == ORDER


def test_many_runs_get_a_large_panel_of_the_mean_and_a_legend_in_the_order_of_the_gaps(many):
    for draw in (drawn.scatter.draw, drawn.distance.draw):
        with matplotlib.rc_context(STYLE):
            figure = draw(many)
            assert figure is not None
            figure.draw_without_rendering()
        shown = panels(figure)
        boxes = {name: axes.get_window_extent() for name, axes in shown.items()}
        large = boxes.pop("mean of domains")
        assert all(large.width * large.height > 2 * box.width * box.height for box in boxes.values())
        legend = shown["mean of domains"].get_legend()
        names = [text.get_text().replace("\n", "").split(" (")[0] for text in legend.get_texts()]
        listed = names
        assert listed == [name for name in ORDER[::-1] if name in listed]
        assert set(ORDER) - set(listed) == (set() if draw is drawn.scatter.draw else {"slow"})
        box = legend.get_window_extent()
        assert not box.overlaps(large)
        assert not any(box.overlaps(each) for each in boxes.values())
        assert box.x1 <= figure.bbox.x1
        left, right = shown["mean of domains"].get_xlim()
        assert left > right, "training should run to the right"


def test_the_reference_stands_out_among_many(many):
    axes = panels(drawn.scatter.draw(many))["mean of domains"]
    black = {line.get_linewidth() for line in axes.lines if line.get_color() == "#000000" and len(line.get_xdata()) > 1}
    others = {line.get_linewidth() for line in axes.lines if line.get_color() in ("#009e73", "#0072b2")}
    assert min(black) > max(others)


def test_gap_figure_has_a_row_for_each_run_sorted_by_gap(many):
    figure = drawn.gap.draw(many)
    assert figure is not None
    shown = panels(figure)
    assert list(shown) == ["mean of domains", "code", "legal"]
    rows = [text.get_text().replace("\n", "").split(" (")[0] for text in figure.axes[0].get_yticklabels()]
    assert rows == ORDER
    assert [text.get_fontweight() for text in figure.axes[0].get_yticklabels()].index("bold") == ORDER.index(
        "transformer_pp"
    )
    for domain, axes in zip((-1, 0, 1), shown.values(), strict=True):
        bottom, top = axes.get_ylim()
        assert bottom > top, "the best should be on top"
        dots = {int(line.get_ydata()[0]): line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1}
        bars = {
            int(line.get_ydata()[0]): list(line.get_xdata()) for line in axes.lines[1:] if len(line.get_xdata()) == 2
        }
        for row, name in enumerate(ORDER[:-1]):
            if name == "transformer_pp":
                assert dots[row] == 0
                assert row not in bars
                continue
            gap = list(many.comparisons[name].by_domain.values())[domain]
            assert dots[row] == gap
            assert row not in bars, "a draft has no interval"
            assert axes.get_xlim()[0] <= gap <= axes.get_xlim()[1]
        assert len(ORDER) - 1 not in dots
    assert [text.get_text().strip() for text in shown["mean of domains"].texts] == ["no gap: too little overlap"]


def test_gap_figure_needs_a_gap(found):
    assert drawn.gap.draw(Findings(found.groups[:1], found.reference)) is None


def test_every_figure_has_a_title_and_a_caption_without_gaps_in_them():
    for figure in drawn.FIGURES:
        for role in (OOD, HOLD_OUT):
            title, caption = (text.format(**asdict(role)) for text in (figure.title, figure.caption))
            assert title
            assert caption[0].isupper()
            assert "{" not in title + caption
    assert len({figure.name for figure in drawn.FIGURES}) == len(drawn.FIGURES)


@pytest.mark.parametrize("count", [1, 8])
def test_a_loss_that_was_logged_once_has_no_panel(tmp_path, count):
    runs = [write_run(tmp_path / f"a{i}", f"a{i}", steps=60) for i in range(count)]
    for run in runs:
        with (run / "curves.csv").open(newline="") as file:
            table = list(csv.reader(file))
        for row in table[1:-1]:
            row[2] = ""
        with (run / "curves.csv").open("w", newline="") as file:
            csv.writer(file).writerows(table)
    assert list(panels(drawn.losses.draw(Findings.read(runs)))) == [
        *("in-domain hold-out", "OOD: code", "OOD: legal", "OOD: mean of domains")
    ]


@pytest.mark.parametrize("count", [1, 8])
def test_losses_of_a_single_evaluation_are_drawn_as_markers(tmp_path, count):
    runs = [write_run(tmp_path / f"a{i}", f"a{i}", steps=4, every=4) for i in range(count)]
    figure: Any = drawn.losses.draw(Findings.read(runs))
    assert len(figure.axes) == 5
    for axes in figure.axes:
        assert [line.get_markevery() for line in axes.lines] == [1] * count


def test_no_tick_of_the_gap_figure_is_clipped(found):
    """The last tick is close to the edge, and its label is long."""
    close = Findings(found.groups, found.reference)
    draft = Draft(dict.fromkeys(close.domains, 0.007), 9, (2.0, 3.0))
    vars(close)["comparisons"] = {group.name: ModelGaps(group, "it", draft=draft) for group in close.others}
    with matplotlib.rc_context(STYLE):
        figure = drawn.gap.draw(close)
        assert figure is not None
        figure.draw_without_rendering()
    for axes in figure.axes:
        low, high = axes.get_xlim()
        ticks = [tick.label1 for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        assert all(label.get_window_extent().x1 <= figure.bbox.x1 for label in ticks)
    assert ticks[-1].get_text() == "+0.005"


def test_long_names_break_where_their_parts_meet():
    assert wrap("hybrid_gated_delta_net_attention (3 seeds)", 30) == "hybrid_gated_delta_net_\nattention (3 seeds)"
    assert wrap("x" * 45, 20).split("\n") == ["x" * 20, "x" * 20, "x" * 5]
    assert wrap("short_name", 20) == "short_name"


def test_finished_models_are_drawn_over_their_tokens(tmp_path):
    runs = []
    for name, gap in (("transformer_pp", 0.0), ("mamba2", 0.1)):
        for seed in (0, 1):
            run = write_run(tmp_path / name / f"seed_{seed}", name, seed=seed, gap=gap)
            for steps in (100, 200):
                write_run(branch_path(run, steps), name, seed=seed, gap=gap, steps=steps)
            runs.append(run)
    found = Findings.read(runs)
    figure = drawn.budgets.draw(found)
    assert figure is not None
    (axes,) = figure.axes
    line = axes.get_lines()[0]
    gap = found.finished["mamba2"]
    assert np.asarray(line.get_xdata()).tolist() == [200 * 4096, 400 * 4096]
    assert np.asarray(line.get_ydata()).tolist() == [each.raw.value for each in gap.budgets]
    assert line.get_markerfacecolor() == "white"  # without a measurement of copying nothing is settled
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["819k", "1.64M"]


def test_the_mean_between_finished_models_has_its_interval(tmp_path):
    runs = []
    for name, gap in (("transformer_pp", 0.0), ("mamba2", 0.1)):
        for seed in (0, 1):
            runs.append(write_run(tmp_path / name / f"seed_{seed}", name, seed=seed, gap=gap, noise=0.01))
            write_run(branch_path(runs[-1], 200), name, seed=seed, gap=gap, steps=200, noise=0.01)
    found = Findings.read(runs)
    figure = drawn.gap.draw(found)
    assert figure is not None
    raw = found.finished["mamba2"].headline.raw
    bars = [each for line in figure.axes[0].lines if len(each := np.asarray(line.get_xdata()).tolist()) == 2]
    assert [raw.low, raw.high] in bars


def test_the_panel_of_finished_models_keeps_its_height_above_many_names(tmp_path):
    heights = []
    for count in (8, 16):
        runs = [tmp_path / f"{count}/{name}" for name in ("transformer_pp", *(f"model_{i}" for i in range(1, count)))]
        for i, run in enumerate(runs):
            for folder, steps in ((run, 400), (branch_path(run, 200), 200)):
                write_run(folder, run.name, gap=0.01 * i, steps=steps)
        with matplotlib.rc_context(STYLE):
            figure = drawn.budgets.draw(Findings.read(runs))
            assert figure is not None
            boxes = texts(figure)
        (label,) = (box for text, box in boxes.items() if "OOD loss above" in text)
        assert not any(box is not label and box.padded(-1).overlaps(label) for box in boxes.values())
        heights.append(figure.axes[0].get_window_extent().height)
    assert heights[1] == pytest.approx(heights[0], rel=0.1)


def test_the_scatter_shows_finished_models_large_and_the_course_between_them_faint(tmp_path):
    run, bare = (write_run(tmp_path / name, name) for name in ("transformer_pp", "mamba2"))
    for steps in (100, 200):
        write_run(branch_path(run, steps), "transformer_pp", steps=steps)
    figure = drawn.scatter.draw(Findings.read([run, bare]))
    assert figure is not None
    lines = figure.axes[-1].get_lines()
    (large, end) = [each for each in lines if each.get_markersize() == 7.5]
    ends = [load_run(each).evaluations for each in (branch_path(run, 100), branch_path(run, 200), run)]
    assert np.asarray(large.get_xdata()).tolist() == [each.in_domain[-1] for each in ends]
    assert np.asarray(large.get_ydata()).tolist() == [each.with_mean()["mean"][-1] for each in ends]
    assert np.asarray(end.get_xdata()).tolist() == [load_run(bare).evaluations.in_domain[-1]]
    assert sorted(opaque for each in lines if (opaque := each.get_alpha())) == [0.35, 1]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Two models, and one whose run was stopped early but has a longer finished model."""
    folder = tmp_path_factory.mktemp("stopped")
    runs = [write_run(folder / name, name, gap=gap) for name, gap in (("transformer_pp", 0.0), ("mamba2", 0.1))]
    runs.append(write_run(folder / "rwkv7", "rwkv7", gap=-0.5, steps=80, facts={"status": "stopped"}))
    for run in runs:
        for steps in (8, 400):
            write_run(branch_path(run, steps), run.name, gap=-0.5 * (run.name == "rwkv7"), steps=steps, every=4)
    return Findings.read(runs)


def test_the_scatter_frames_the_longest_finished_model_of_each_run(stopped):
    figure = drawn.scatter.draw(stopped)
    assert figure is not None
    for domain, axes in zip(stopped.domains, figure.axes, strict=True):
        large = [np.asarray(line.get_xydata()) for line in axes.lines if line.get_markersize() == 7.5]
        for (_, run), markers in zip(stopped.runs, large, strict=True):
            models = run.finished_models()
            assert models is not None
            longest = models.in_domain[-1], models.with_mean()[domain][-1]
            assert longest in map(tuple, markers)
            assert all(axes.viewLim.contains(*marker) for marker in markers), "none is half outside"
            assert len(markers) < len(models.tokens), "the first one lies in the first quarter of training"


@pytest.mark.parametrize("kind", ["found", "many", "capable", "stopped"])
def test_the_note_on_the_identity_line_lies_on_no_curve(kind, request):
    with matplotlib.rc_context(STYLE):
        figure = drawn.scatter.draw(request.getfixturevalue(kind))
        assert figure is not None
        figure.draw_without_rendering()
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
    assert note.get_text() == ("identity line 2.9 nats below" if height == 3.9 else "dashed: identity")
    assert axes.get_ylim()[0] < height


def test_the_entropy_of_a_longer_run_is_not_cut(tmp_path):
    runs = [write_run(tmp_path / name, name, steps=steps) for name, steps in (("short", 100), ("long", 400))]
    figure: Any = drawn.entropy.draw(Findings.read(runs))
    for line in figure.plotted:
        low, high = line.axes.get_xlim()
        assert low == 0 < line.x.max() <= high


def test_the_entropy_of_a_single_evaluation_is_drawn_as_markers(tmp_path):
    figure: Any = drawn.entropy.draw(Findings.read([write_run(tmp_path / "a", "a", steps=4, every=4)]))
    assert [line.get_marker() for line in figure.axes[0].lines] == ["."] * 4


@pytest.mark.parametrize(("marks", "shown"), [(range(1, 61), 7), ([1, 7, 30, 60], 4), (None, 7)])
def test_numbers_on_a_logarithmic_axis_do_not_touch(marks, shown):
    figure, (axes,) = new_panels(1)
    axes.plot([1, 60 if marks else 1e15], [0, 1])
    log_axis(axes, marks)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(left.x1 + 3 < right.x0 for left, right in pairwise(boxes))
    assert len(boxes) >= shown
    assert axes.get_xticks()[-1] == (60 if marks else 3e15), "the largest one in view"


def test_only_a_gap_that_is_not_settled_is_hollow(capable, monkeypatch):
    """Whatever the look of its model is."""
    name = capable.others[0].name
    looks = {each: replace(look, hollow=True) for each, look in capable.styles.items()}
    monkeypatch.setitem(vars(capable), "styles", looks)
    for settled in (True, False):
        monkeypatch.setattr("seqarch.report.estimates.Gap.settled", settled)
        figure: Any = drawn.budgets.draw(capable)
        (face,) = {line.get_markerfacecolor() for line in figure.axes[0].lines[:1]}
        assert face == (looks[name].colour if settled else "white")
    figure = drawn.gap.draw(capable)
    (dot,) = (line for line in figure.axes[0].lines if list(line.get_ydata()) == [1])
    assert dot.get_markerfacecolor() == looks[name].colour, "it is no draft"


def test_the_reason_for_no_gap_stays_in_its_panel_next_to_negative_gaps(tmp_path):
    runs = [write_run(tmp_path / name, name, gap=gap) for name, gap in (("pp", 0.0), ("a", -1.0), ("b", -2.0))]
    runs.append(write_run(tmp_path / "slow", "slow", speed=0.01))
    with matplotlib.rc_context(STYLE):
        figure: Any = drawn.gap.draw(Findings.read(runs))
        figure.draw_without_rendering()
    axes = figure.axes[0]
    (text,) = axes.texts
    box = text.get_window_extent()
    assert axes.bbox.x0 < box.x0
    assert box.x1 < axes.bbox.x1


@pytest.mark.parametrize(("tokens", "words"), [(1, "tokens seen"), (40, "tokens seen (thousands)")])
def test_the_unit_of_tokens_is_named_once(tmp_path, tokens, words):
    figure: Any = drawn.losses.draw(Findings.read([write_run(tmp_path / "a", "a", tokens_per_step=tokens)]))
    assert figure.get_supxlabel() == words


def test_without_branches_there_is_no_figure_of_budgets(found):
    assert drawn.budgets.draw(found) is None


def test_recall_has_a_panel_for_each_distance_and_a_line_for_each_run_that_measured_it(tmp_path, found):
    runs = [write_run(tmp_path / name, name) for name in ("attention", "mamba2", "based")]
    for number, run in enumerate(runs[:2]):
        with (run / "curves.csv").open() as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            row |= {"repeat_gain/1024": number, "repeat_gain/256": number + 0.5} if row["loss/ood"] else {}
        with (run / "curves.csv").open("w") as file:
            writer = csv.DictWriter(file, [*rows[0], "repeat_gain/1024", "repeat_gain/256"])
            writer.writeheader()
            writer.writerows(rows)
    figure = drawn.recall.draw(Findings.read(runs))
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == ["256 tokens apart", "1,024 tokens apart"]
    for axes, first in zip(figure.axes, (0.5, 0), strict=True):
        assert [np.asarray(line.get_ydata())[-1] for line in axes.get_lines()[:-1]] == [first, first + 1]
    assert drawn.recall.draw(found) is None
