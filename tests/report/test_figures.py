"""What the figures of a report contain, for few runs and for many."""

from __future__ import annotations

import csv
from dataclasses import asdict, replace
from typing import Any

import matplotlib
import numpy as np
import pytest

from seqarch.report import Findings
from seqarch.report import figures as drawn
from seqarch.report.panels import STYLE
from seqarch.report.roles import HOLD_OUT, OOD
from seqarch.report.runs import load_run
from seqarch.runs.folder import branch_path
from tests.report.runs_for_tests import write_branched, write_run


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


def test_entropy_has_a_line_for_each_layer_and_a_panel_for_each_run_that_logged_it(found):
    figure = drawn.entropy.draw(found)
    assert figure is not None
    with_entropy = [axes for axes in figure.axes if axes.lines]
    assert [len(axes.lines) for axes in with_entropy] == [4, 4]


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


def test_a_figure_without_data_is_left_out(found):
    alone, no_entropies = Findings(found.groups[:1], found.reference), Findings(found.groups[2:], found.groups[2])
    cases = [(drawn.distance, alone), (drawn.gap, alone), (drawn.budgets, found), (drawn.recall, found)]
    for figure, findings in [*cases, (drawn.entropy, no_entropies)]:
        assert figure.draw(findings) is None


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


def test_finished_models_are_drawn_over_their_tokens(tmp_path):
    runs = []
    for name, gap in (("transformer_pp", 0.0), ("mamba2", 0.1)):
        for seed in (0, 1):
            runs.append(write_branched(tmp_path / name / f"seed_{seed}", name, seed=seed, gap=gap))
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
            folder = tmp_path / name / f"seed_{seed}"
            runs.append(write_branched(folder, name, (200,), seed=seed, gap=gap, noise=0.01))
    found = Findings.read(runs)
    figure = drawn.gap.draw(found)
    assert figure is not None
    raw = found.finished["mamba2"].headline.raw
    bars = [each for line in figure.axes[0].lines if len(each := np.asarray(line.get_xdata()).tolist()) == 2]
    assert [raw.low, raw.high] in bars


def test_the_scatter_shows_finished_models_large_and_the_course_between_them_faint(tmp_path):
    run = write_branched(tmp_path / "transformer_pp", "transformer_pp")
    bare = write_run(tmp_path / "mamba2", "mamba2")
    figure = drawn.scatter.draw(Findings.read([run, bare]))
    assert figure is not None
    lines = figure.axes[-1].get_lines()
    (large, end) = [each for each in lines if each.get_markersize() == 7.5]
    ends = [load_run(each).evaluations for each in (branch_path(run, 100), branch_path(run, 200), run)]
    assert np.asarray(large.get_xdata()).tolist() == [each.in_domain[-1] for each in ends]
    assert np.asarray(large.get_ydata()).tolist() == [each.with_mean()["mean"][-1] for each in ends]
    assert np.asarray(end.get_xdata()).tolist() == [load_run(bare).evaluations.in_domain[-1]]
    assert sorted(opaque for each in lines if (opaque := each.get_alpha())) == [0.35, 1]


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


def test_the_entropy_of_a_longer_run_is_not_cut(tmp_path):
    runs = [write_run(tmp_path / name, name, steps=steps) for name, steps in (("short", 100), ("long", 400))]
    figure: Any = drawn.entropy.draw(Findings.read(runs))
    for line in figure.plotted:
        low, high = line.axes.get_xlim()
        assert low == 0 < line.x.max() <= high


def test_the_entropy_of_a_single_evaluation_is_drawn_as_markers(tmp_path):
    figure: Any = drawn.entropy.draw(Findings.read([write_run(tmp_path / "a", "a", steps=4, every=4)]))
    assert [line.get_marker() for line in figure.axes[0].lines] == ["."] * 4


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


@pytest.mark.parametrize(("tokens", "words"), [(1, "tokens seen"), (40, "tokens seen (thousands)")])
def test_the_unit_of_tokens_is_named_once(tmp_path, tokens, words):
    figure: Any = drawn.losses.draw(Findings.read([write_run(tmp_path / "a", "a", tokens_per_step=tokens)]))
    assert figure.get_supxlabel() == words


def test_recall_has_a_panel_for_each_distance_and_a_line_for_each_run_that_measured_it(tmp_path):
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
