"""The numbers of the README's exam are what its commands make of the records, and what SciPy makes of the curves."""

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

ZOO = Path(__file__).parents[1]
SECTION = (ZOO / "README.md").read_text(encoding="utf-8").split("## The exam at `small`\n")[1].split("\n## ")[0]
GAPS, LOSSES = (table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", SECTION, flags=re.MULTILINE))
PROSE = " ".join(re.sub(r"^\|.*", "", SECTION, flags=re.MULTILINE).split())
DOMAINS = ("arxiv", "github", "speech", "stack", "wiki")
REFERENCE, FORGETTING, ASSOCIATIVE = "transformer_pp", "FlaLayer-ForgettingAttention", "GatedAssociative"
ENDS = ("branches/step_00000649", "branches/step_00001298", ".")
"""Folders of the finished models of a run, by rising tokens."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder that the README's first commands fill, and what the last of them prints."""
    folder, printed = tmp_path_factory.mktemp("exam"), ""
    for line in re.findall(r"^\$ python (.*)", SECTION.partition("|")[0], flags=re.MULTILINE):
        place = {"runs/exam/small": f"{folder}/runs", "tables": f"{folder}/tables"}
        command = [sys.executable, *(place.get(word, word) for word in shlex.split(line))]
        printed = subprocess.run(command, cwd=ZOO.parents[1], capture_output=True, text=True, check=True).stdout
    return folder, printed


def test_the_table_is_what_the_commands_print(made):
    assert made[1].splitlines() == GAPS
    assert len(GAPS) == 4


def test_the_losses_are_those_of_the_records(made):
    with (made[0] / "tables/losses.csv").open(newline="") as file:
        losses = list(csv.DictReader(file))
    budgets = sorted({int(row["tokens"]) for row in losses})

    def line(name):
        def over_seeds(column, tokens):
            return mean(float(row[column]) for row in losses if (row["model"], row["tokens"]) == (name, str(tokens)))

        seeds = {row["seed"] for row in losses if row["model"] == name}
        cells = [f"{over_seeds(column, tokens):.3f}" for column in ("in_domain", "ood") for tokens in budgets]
        return f"| `{name}` | {len(seeds)} | {' | '.join(cells)} | {over_seeds('copying', budgets[-1]):.2f} |"

    assert [line(name) for name in (REFERENCE, FORGETTING, ASSOCIATIVE)] == LOSSES[2:]


def ends(folder, name, seed):
    """In-domain loss and losses of the domains of a run's finished models, `[3, 6]`, from its curves."""
    found = []
    for end in ENDS:
        with (folder / "runs" / name / f"seed_{seed}" / end / "curves.csv").open(newline="") as file:
            last = [row for row in csv.DictReader(file) if row["loss/in_domain"]][-1]
        found.append([float(last[tag]) for tag in ("loss/in_domain", *(f"loss/ood/{domain}" for domain in DOMAINS))])
    return np.array(found)


def test_gaps_by_seed_and_domain_are_those_of_scipys_cubics(made):
    """What the bullets and the checks say of 170M tokens."""
    interpolate = pytest.importorskip("scipy.interpolate", reason="scipy is not installed: pip install scipy")

    def gap(name, seed, other, curve=interpolate.PchipInterpolator):
        one, reference = ends(made[0], name, seed), ends(made[0], REFERENCE, other)
        floor = max(one[:, 0].min(), reference[:, 0].min())
        at = [curve(models[::-1, 0], models[::-1, 1:])(floor) for models in (one, reference)]
        return at[0] - at[1]

    pairs = np.stack([gap(ASSOCIATIVE, seed, seed) for seed in (0, 1)])
    straight = mean(gap(ASSOCIATIVE, s, s, lambda x, y: interpolate.interp1d(x, y, axis=0)).mean() for s in (0, 1))
    below = [float((ends(made[0], ASSOCIATIVE, s)[2] - ends(made[0], REFERENCE, s)[0])[1:].mean()) for s in (0, 1)]
    third = [gap(ASSOCIATIVE, 2, other).mean() for other in (0, 1)]
    domains = dict(zip(DOMAINS, pairs.mean(axis=0), strict=True))
    low, high = min(domains, key=domains.__getitem__), max(domains, key=domains.__getitem__)
    assert pairs.min() > 0
    for said in (
        f"worse by {pairs.mean():+.3f} ± ",
        f"({pairs[0].mean():+.3f} and {pairs[1].mean():+.3f})",
        f"from {domains[low]:+.3f} on `{low}` to {domains[high]:+.3f} on `{high}`",
        f"give {straight:+.3f} for `GatedAssociative`",
        f"gives {third[0]:+.3f} and {third[1]:+.3f}",
        f"by {below[0]:.3f} and {below[1]:.3f}",
        f"has {gap(FORGETTING, 0, 1).mean():+.3f}",
    ):
        assert said in PROSE
    signs = {domain: value < 0 for domain, value in zip(DOMAINS, gap(FORGETTING, 0, 0), strict=True)}
    assert signs == {"arxiv": True, "github": True, "speech": True, "stack": False, "wiki": False}
