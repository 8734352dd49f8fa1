"""The report as a whole: files, tables, page and what the figures hold."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from seqarch.errors import SeqarchWarning, UserError
from seqarch.report import compare, load_run
from seqarch.report.costs import costs
from seqarch.report.draft import tokens_to_reach
from seqarch.report.figures import FIGURES
from seqarch.report.findings import Findings
from seqarch.report.panels import STYLE, panels, write
from seqarch.report.runs import Group
from seqarch.report.tables import write_tables
from tests.report.runs_for_tests import write_run

TABLES = ("models.csv", "gap.csv", "convergence.csv", "scatter.csv", "entropy.csv")


@pytest.fixture(scope="module")
def made(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "report"
    written = compare(runs).write(out)
    assert written[0] == out / "index.html"
    assert sorted(written) == sorted(out.iterdir())
    return out


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_files_are_pictures_tables_and_a_page(made):
    stems = {"scatter", "gap", "distance", "losses", "entropy"}
    names = {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    assert {path.name for path in made.iterdir()} == names | {"index.html", *TABLES}
    for stem in stems:
        assert (made / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (made / f"{stem}.svg").read_text()


def test_scatter_table_holds_every_evaluation_of_every_domain(made, runs):
    table = rows(made / "scatter.csv")
    assert len(table) == 3 * 20 * 3
    evaluations = load_run(runs[1]).evaluations
    code = [row for row in table if row["run"] == "_top1_$chunk$<b>" and row["domain"] == "code"]
    assert [float(row["in_domain_loss"]) for row in code] == evaluations.in_domain.tolist()
    assert [float(row["ood_loss"]) for row in code] == evaluations.losses["code"].tolist()
    assert [int(row["step"]) for row in code] == evaluations.step.tolist()


def test_entropy_table_holds_every_layer_of_every_seed(tmp_path):
    attention = [write_run(tmp_path / f"a{seed}", "a", seed=seed) for seed in (0, 1)]
    recurrent = write_run(tmp_path / "r", "r", layers=2, entropy_tag="implied_entropy")
    write_tables(compare([*attention, recurrent]).findings, tmp_path)
    table = rows(tmp_path / "entropy.csv")
    assert len(table) == (2 * 4 + 2) * 20
    assert {(row["run"], row["weights"]) for row in table} == {("a", "attention"), ("r", "implied")}
    curve = load_run(attention[1]).entropy_layers()[2]
    chosen = [row for row in table if (row["run"], row["seed"], row["layer"]) == ("a", "1", "2")]
    assert [float(row["entropy"]) for row in chosen] == curve.value.tolist()
    assert [int(row["step"]) for row in chosen] == curve.step.tolist()
    assert [int(row["tokens"]) for row in chosen] == curve.tokens.tolist()


def test_gap_table_recovers_the_gaps_put_in(made):
    table = rows(made / "gap.csv")
    assert [row["domain"] for row in table] == ["code", "legal", "mean"] * 2
    truths = (0.05, 0.065, 0.0575, 0.1, 0.13, 0.115)
    for row, truth in zip(table, truths, strict=True):
        assert float(row["gap"]) == pytest.approx(truth, abs=0.006)
        assert row["reference"] == "transformer_pp"
        assert row["refused"] == ""


def test_model_table_says_what_ran_and_what_it_took(tmp_path):
    folders = [write_run(tmp_path / f"a{seed}", "a", seed=seed, facts={"commit": f"c{seed}"}) for seed in (0, 1)]
    (folders[0] / "exam.json").write_text('{"fingerprint": "f", "minutes": 5.0}')  # the other took 3 by its own dates
    unknown = {"commit": None, "finished": None, "tokenizer": "byte"}
    found = Findings.read([*folders, write_run(tmp_path / "b", "b", facts=unknown)])
    write_tables(found, tmp_path)
    first, second = rows(tmp_path / "models.csv")
    expected = {"run": "a", "seeds": "0 1", "status": "finished", "mixers": "Attention", "parameters": "1650000"}
    expected |= {
        "steps": "400",
        "tokens": "1638400",
        "train": "docs",
        "tokenizer": "byte",
        "tokens_per_second": "21000.0",
    }
    expected |= {"mfu": "", "minutes_a_run": "4.0", "hardware": "1 x CPU", "commits": "c0; c1"}
    assert {key: first[key] for key in expected} == expected
    assert "torch 2.13.0" in first["versions"]
    ends = [one.in_domain[-1] for one in found.groups[0].evaluations]
    assert float(first["in_domain_loss"]) == pytest.approx(np.mean(ends))
    assert (second["seeds"], second["commits"], second["minutes_a_run"]) == ("0", "", "")


def test_the_minutes_of_a_run_are_those_of_the_longest_runs(tmp_path):
    runs = [write_run(tmp_path / f"{n}", "a", seed=n, steps=steps) for n, steps in enumerate((400, 400, 200))]
    for run, minutes in zip(runs, (5.0, 7.0, 1.0), strict=True):
        (run / "exam.json").write_text(json.dumps({"minutes": minutes}))
    group = Group("a", [load_run(run) for run in runs[::-1]])
    assert costs(group).minutes_a_run == 6.0
    assert group.tokens == 400 * 4096


def test_convergence_table_says_how_many_tokens_a_loss_took(made, runs):
    table = rows(made / "convergence.csv")
    assert [row["run"] for row in table] == ["_top1_$chunk$<b>"] * 4 + ["mamba2"] * 4
    top1, reference = (load_run(runs[i]).evaluations for i in (1, 0))
    for row in table[:4]:
        loss = float(row["in_domain_loss"])
        assert float(row["tokens"]) == pytest.approx(tokens_to_reach(top1, np.array(loss)))
        assert float(row["reference_tokens"]) == pytest.approx(tokens_to_reach(reference, np.array(loss)))
        assert float(row["ratio"]) == float(row["tokens"]) / float(row["reference_tokens"])
    assert float(table[3]["ratio"]) > 1, "trained at 0.9 of the speed"


class Page(HTMLParser):
    """Collects the tags of a page, its text, and the addresses that it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_is_whole_and_needs_no_other_file(made):
    page = Page(made / "index.html")
    assert page.open == []
    assert len(page.addresses) == 5
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)
    style = (made / "index.html").read_text().split("</style>")[0]
    assert "prefers-color-scheme: dark" in style
    assert "url(" not in style
    assert "@import" not in style


def test_page_tells_gaps_facts_and_differences(made):
    text = Page(made / "index.html").text
    for expected in (
        "_top1_$chunk$<b> against transformer_pp, a draft: +0.05",
        "It has no interval",
        "1.65M",
        "tokens_per_second",
        "21k",
        "torch 2.13.0",
        "0123456789",
        "1 x CPU",
        "model.mixers.mixer",
    ):
        assert expected in text, expected
    assert "seed_everything" not in text  # equal in all runs
    assert "triton" not in text  # not installed there


def test_models_say_that_operations_were_counted_and_evaluations_left_out(tmp_path):
    folder = write_run(tmp_path / "a", "a", facts={"flops_counted": True})
    head, *lines = (folder / "curves.csv").read_text().splitlines()
    cells = [[*line.split(","), "0.25"] for line in lines]
    place = head.split(",").index("loss/ood/code")
    next(row for row in cells if row[place])[place] = "nan"
    text = "\n".join([f"{head},throughput/mfu", *map(",".join, cells)])
    (folder / "curves.csv").write_text(f"{text}\n")
    write_tables(Findings.read([folder]), tmp_path)
    (row,) = rows(tmp_path / "models.csv")
    assert (row["mfu"], row["flops_counted"], row["evaluations_left_out"]) == ("0.25", "True", "1")


@pytest.mark.usefixtures("unpainted")
def test_report_of_one_run_has_no_gap_and_no_stale_figures(tmp_path, runs, made):
    out = tmp_path / "out"
    shutil.copytree(made, out)
    written = compare([runs[2]]).write(out)
    assert {path.name for path in written} == {
        *("index.html", *TABLES, "scatter.png", "scatter.svg", "losses.png", "losses.svg")
    }
    assert set(out.iterdir()) == set(written)
    assert rows(out / "gap.csv") == []
    assert "base-capability gap" not in Page(out / "index.html").text
    assert compare([runs[2]]).table.splitlines()[0].split() == ["run", "tokens", "in-domain", "OOD"]


def test_reference_can_be_chosen_by_name(runs):
    text = compare(runs, "mamba2").table
    assert "gap to 'mamba2'" in text
    assert re.search(r"transformer_pp .* -0\.1\d\d", text)
    with pytest.raises(UserError, match=re.escape("unknown reference run 'mamba': did you mean mamba2?")):
        compare(runs, "mamba")


def test_summary_is_a_table_of_gaps(runs):
    title, head, *lines = compare(runs).table.splitlines()
    assert "nats per token" in title
    assert head.split()[:4] == ["run", "tokens", "in-domain", "OOD"]
    assert lines[0].startswith("transformer_pp")
    assert lines[0].endswith("reference")
    assert re.search(r"^mamba2 +1\.64M +\d\.\d{3} +\d\.\d{3} +\+0\.1\d\d ", lines[2])


@pytest.mark.usefixtures("unpainted")
def test_a_run_that_cannot_be_compared_is_told_and_stops_nothing(tmp_path, runs):
    slow = write_run(tmp_path / "slow", "slow", speed=0.01)
    written = compare([runs[0], slow]).write(tmp_path / "out")
    assert {"scatter.png", "losses.png"} <= {path.name for path in written}
    (row,) = rows(tmp_path / "out" / "gap.csv")
    assert row["gap"] == ""
    assert "nats of in-domain loss, not 0.05" in row["refused"]
    assert "No gap for 'slow' against 'transformer_pp'" in Page(tmp_path / "out" / "index.html").text
    assert "no gap, see below" in compare([runs[0], slow]).table
    assert compare([runs[0], slow]).table.splitlines()[-1] == row["refused"]


def test_seeds_of_one_name_are_one_row(tmp_path, runs):
    seeds = [write_run(tmp_path / f"m{seed}", "mamba2", gap=0.1, layers=0, seed=seed) for seed in (1, 2)]
    lines = compare([*runs, *seeds]).table.splitlines()
    assert sum(line.startswith("mamba2") for line in lines) == 1
    found = compare([*runs, *seeds]).findings
    write_tables(found, tmp_path)
    gaps = [row for row in rows(tmp_path / "gap.csv") if row["run"] == "mamba2"]
    assert {(row["run_seeds"], row["reference_seeds"]) for row in gaps} == {("3", "1")}


def test_out_must_not_be_a_file(tmp_path, runs):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        compare(runs).write(tmp_path / "file")


@pytest.mark.parametrize(("name", "lacking"), [("größe", ""), ("名前_名", "前名")])
def test_letters_that_the_font_lacks_are_said_once(tmp_path, scatter_only, name, lacking):
    write_run(tmp_path / name, name)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compare([tmp_path / name]).write(tmp_path / "report")
    expected = f"the font of the figures, DejaVu Sans, lacks {lacking}: each letter of these is drawn as a box"
    assert [(each.category, str(each.message)) for each in said] == [(SeqarchWarning, expected)] * bool(lacking)
    assert all(each.filename == __file__ for each in said)


def test_rounding_of_the_layout_does_not_change_a_picture(tmp_path):
    files = []
    for nudge in (0.0, 1e-13):
        with matplotlib.rc_context(STYLE):
            figure, (axes,) = panels(1)
            axes.plot([0, 1], [0, 1])
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            axes.set_position((np.array(axes.get_position().bounds) + nudge).tolist())
            files.append(write(figure, tmp_path / str(nudge))[1].read_bytes())
    assert files[0] == files[1]


@pytest.mark.commands
def test_report_needs_neither_torch_nor_lightning(runs, tmp_path):
    code = (
        "import sys; from pathlib import Path; from seqarch.report import compare, figures\n"
        "figures.FIGURES = figures.FIGURES[:1]\n"
        f"compare([Path({str(runs[0])!r})]).write(Path({str(tmp_path)!r}))\n"
        "print([name for name in ('torch', 'lightning', 'matplotlib.pyplot') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Points(HTMLParser):
    """The labels of the page's points, by the heading of their figure."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.said: dict[str, list[str]] = {}
        self.tags: set[str] = set()
        self.within = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.within = tag
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data):
        if self.within == "h2":
            self.said[data] = self.said.get(data, [])
        elif self.within == "title" and self.said:
            self.said[list(self.said)[-1]].append(data)

    def handle_endtag(self, tag):
        self.within = ""


def test_points_of_the_page_say_what_the_curves_hold(made, runs):
    points = Points(made / "index.html").said
    assert all(title[0].isupper() for title in points)
    said = points["In-domain hold-out loss against OOD loss"]
    table = {(row["run"], row["step"]): row for run in runs for row in curves(run)}
    seen = set()
    for text in said:
        found = re.fullmatch(
            r"(.+), seed 0, step (\d+)\nin-domain ([\d.]+), OOD ([\d.]+)\n(code|legal|mean of domains) ([\d.]+)", text
        )
        assert found, text
        name, step, inside, mean, domain, value = found.groups()
        row = table[name, step]
        column = "loss/ood" if domain == "mean of domains" else f"loss/ood/{domain}"
        assert (inside, mean, value) == tuple(
            f"{float(row[key]):.4f}" for key in ("loss/in_domain", "loss/ood", column)
        )
        seen.add((name, step, domain))
    assert len(seen) == len(said) > 3 * 3 * 8
    assert {name for name, *_ in seen} == {"transformer_pp", "_top1_$chunk$<b>", "mamba2"}


def curves(run: Path) -> list[dict[str, str]]:
    with (run / "curves.csv").open(newline="") as file:
        return [{**row, "run": load_run(run).name} for row in csv.DictReader(file)]


@pytest.fixture
def scatter_only(monkeypatch):
    """Reports have one figure."""
    monkeypatch.setattr("seqarch.report.figures.FIGURES", [each for each in FIGURES if each.name == "scatter"])


def test_a_hostile_name_does_not_run(tmp_path, scatter_only):
    name = '</title></circle><script>alert(1)</script><img src=x onerror=alert(1)>"&{{7*7}}'
    compare([write_run(tmp_path / "a", "a"), write_run(tmp_path / "b", name, gap=0.1)]).write(tmp_path / "out")
    page = Points(tmp_path / "out/index.html")
    assert "script" not in page.tags
    assert any(text.startswith(name) for said in page.said.values() for text in said)
    assert "<script" not in (tmp_path / "out/index.html").read_text()


def test_a_figure_of_many_points_keeps_the_last_ones(tmp_path, monkeypatch, scatter_only):
    monkeypatch.setattr("seqarch.report.panels.POINTS", 20)
    compare([write_run(tmp_path / "a", "a"), write_run(tmp_path / "b", "b")]).write(tmp_path / "out")
    found = Points(tmp_path / "out/index.html").said
    assert max(map(len, found.values())) <= 32
    assert any("step 400" in text for text in found["In-domain hold-out loss against OOD loss"])


@pytest.mark.commands
def test_report_is_the_same_each_time_whatever_a_user_set_and_leaves_the_settings_alone(made, runs, tmp_path):
    users: dict[Any, Any] = {
        "text.usetex": True,
        "lines.linewidth": 9,
        "savefig.dpi": 30,
        "axes.prop_cycle": "cycler('color', ['k'])",
    }
    with matplotlib.rc_context(users):
        before = dict(matplotlib.rcParams)
        compare(runs).write(tmp_path)
        assert dict(matplotlib.rcParams) == before
    for name in ("index.html", "scatter.png", "scatter.svg", "gap.csv"):
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes(), name


def test_a_report_that_fails_leaves_the_old_one(made, runs, tmp_path, monkeypatch, scatter_only):
    def fail(*_):
        raise KeyboardInterrupt

    shutil.copytree(made, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr("seqarch.report.page.render", fail)
    with pytest.raises(KeyboardInterrupt):
        compare(runs[:1]).write(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_report_replaces_a_link_and_not_what_it_leads_to(runs, tmp_path, scatter_only):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "out").mkdir()
    for name in ("index.html", "scatter.svg", "models.csv"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "victim")
    compare(runs).write(tmp_path / "out")
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "out/index.html").is_symlink()
