"""Runs on a mix of domains without OOD domains: the hold-outs of the training domains are compared."""

import csv
from typing import Any

import matplotlib
import pytest

from seqarch.errors import UserError
from seqarch.report import Findings, compare, figures, load_run, panels
from seqarch.report.draft import draft_gap
from seqarch.report.findings import ModelGaps
from tests.report.runs_for_tests import load_groups, write_branched, write_run

MIX = ("web", "arxiv", "github")


@pytest.fixture
def runs(tmp_path):
    options = {"domains": (), "mix": MIX}
    return [write_run(tmp_path / "pp", "pp", **options), write_run(tmp_path / "mamba", "mamba", gap=0.08, **options)]


def test_each_hold_out_is_compared_at_the_loss_on_the_mix(runs):
    found = Findings.read(runs)
    assert found.reference.runs[0].domains == ["arxiv", "github", "web"]
    gaps = found.comparisons["mamba"].by_domain
    assert gaps == pytest.approx({"arxiv": 0.08, "github": 0.08, "web": -0.02, "mean": 0.14 / 3}, abs=0.006)


def test_a_gap_that_the_mix_weighs_is_zero(runs):
    """A loss on one domain is a gain on another, because the loss on the mix is equal by construction."""
    reference, group = load_groups(runs)
    gaps = draft_gap(group.evaluations, reference.evaluations).gaps
    assert sum(share * gaps[name] for name, share in group.runs[0].facts["train"].items()) == pytest.approx(0, abs=1e-9)


def test_finished_gaps_that_the_mix_weighs_are_zero(tmp_path):
    options = {"domains": (), "mix": MIX}
    runs = [write_branched(tmp_path / name, name, gap=gap, **options) for name, gap in (("pp", 0.0), ("mamba", 0.08))]
    found = Findings.read(runs)
    gap, shares = found.comparisons["mamba"].finished, found.reference.runs[0].facts["train"]
    assert gap is not None
    weighted = sum(share * gap.headline.domains[name] for name, share in shares.items())
    assert weighted == pytest.approx(0, abs=1e-9)


def test_the_mean_goes_over_the_domains_asked_for(runs):
    reference, group = load_groups(runs, ["github", "arxiv"])
    draft = draft_gap(group.evaluations, reference.evaluations)
    assert list(draft.gaps) == ["arxiv", "github", "mean"]
    assert draft.overall == pytest.approx((draft.gaps["arxiv"] + draft.gaps["github"]) / 2)
    assert "averaged over the hold-outs of arxiv, github at" in ModelGaps(group, "pp", draft=draft).sentence
    alone = draft_gap(*(one.evaluations for one in reversed(load_groups(runs, ["github"]))))
    assert alone.gaps == {"github": draft.gaps["github"]}
    assert "nats per token on the hold-out of github at" in ModelGaps(group, "pp", draft=alone).sentence


@pytest.mark.usefixtures("unpainted")
def test_nothing_in_the_report_is_called_ood(runs, tmp_path):
    compare(runs).write(tmp_path / "out")
    page = (tmp_path / "out/index.html").read_text(encoding="utf-8")
    text = page[: page.index("<img")] + "".join(part.partition('"')[2] for part in page.split("base64,")[1:])
    assert "so nothing is OOD" in text
    assert text.count("OOD") == 1
    assert "mamba against pp, a draft: +0.0" in text
    assert "averaged over the hold-outs of the training domains" in text
    with (tmp_path / "out/gap.csv").open(newline="") as file:
        assert {row["role"] for row in csv.DictReader(file)} == {"in_domain"}
    with (tmp_path / "out/scatter.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    web = [float(row["holdout_loss"]) for row in rows if row["run"] == "mamba" and row["domain"] == "web"]
    assert web == load_run(runs[1]).evaluations.losses["web"].tolist()
    said = compare(runs).table
    assert said.startswith("In-domain gap to 'pp': hold-out loss at the same loss on the held-out mix, nats per token")
    assert "OOD" not in said


def test_figures_say_what_they_show(runs):
    found = Findings.read(runs)
    with matplotlib.rc_context(panels.STYLE):
        drawings = [figures.scatter.draw(found), figures.distance.draw(found)]
        over_time: Any = figures.losses.draw(found)
    for figure in drawings:
        assert figure is not None
        assert figure.get_supylabel().startswith("hold-out loss")
        assert figure.get_supxlabel().startswith("loss on the held-out mix (nats per token)")
        assert [axes.get_title(loc="left") for axes in figure.axes] == ["arxiv", "github", "web", "mean of domains"]
    assert [axes.get_title(loc="left") for axes in over_time.axes] == [
        *("training", "held-out mix", "hold-out: arxiv", "hold-out: github", "hold-out: web")
    ]


def test_domains_may_be_chosen_among_ood_domains_too(tmp_path):
    run = write_run(tmp_path / "a", "a", steps=100)
    (group,) = load_groups([run], ["legal"])
    assert list(group.evaluations[0].with_mean()) == ["legal"]
    with pytest.raises(UserError, match="unknown OOD domain 'docs': expected code or legal"):
        load_groups([run], ["docs"])


def test_a_mix_is_not_compared_with_a_run_that_has_ood_domains(runs, tmp_path):
    other = write_run(tmp_path / "other", "other", mix=MIX)
    with pytest.raises(UserError, match=r"they differ in OOD domains \(none and code, legal\)"):
        load_groups([runs[0], other])


def test_a_domain_that_was_not_trained_on_is_refused(runs):
    with pytest.raises(UserError, match="unknown training domain 'arxive': did you mean arxiv"):
        load_groups(runs, ["arxive"])
