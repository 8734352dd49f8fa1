"""The numbers of the zoo's exam are what its commands make of the records, and what SciPy makes of the curves."""

import csv
import inspect
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import yaml

ZOO = Path(__file__).parents[1]
README = (ZOO / "README.md").read_text(encoding="utf-8").split("## The exam at `small`\n")[1].split("\n## ")[0]
SECTION = README + (ZOO / "pages/exam_small.md").read_text(encoding="utf-8").partition("\n\n")[2]
GAPS, LOSSES, CHECKS = (table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", SECTION, flags=re.MULTILINE))
PROSE = " ".join(re.sub(r"^\|.*", "", SECTION, flags=re.MULTILINE).split())
BULLETS = {text.split("`")[1]: text for text in PROSE.split("## Losses")[0].split("* **")[1:]}
"""What the page says of each mixer."""
DOMAINS = ("arxiv", "github", "speech", "stack", "wiki")
REFERENCE, ASSOCIATIVE, GATED = "transformer_pp", "GatedAssociative", "GatedAttention"
FORGETTING, GLA, HGRN2 = (f"FlaLayer-{name}Attention" for name in ("Forgetting", "GatedLinear", "HGRN2"))
SINGLE = (FORGETTING, GATED, HGRN2, GLA)
"""Models with one pair of seeds."""
ENDS = ("branches/step_00000649", "branches/step_00001298", ".")
"""Folders of the finished models of a run, by rising tokens."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder that the README's first commands fill, and what the last of them prints."""
    folder, printed = tmp_path_factory.mktemp("exam"), ""
    for line in re.findall(r"^\$ python (.*)", README.partition("|")[0], flags=re.MULTILINE):
        place = {"runs/exam/small": f"{folder}/runs", "tables": f"{folder}/tables"}
        command = [sys.executable, *(place.get(word, word) for word in shlex.split(line))]
        printed = subprocess.run(command, cwd=ZOO.parents[1], capture_output=True, text=True, check=True).stdout
    return folder, printed


@pytest.fixture(scope="module")
def losses(made):
    """The rows of losses.csv by model, seed and number of the budget."""
    found = rows(made[0] / "tables/losses.csv")
    budgets = sorted({int(row["tokens"]) for row in found})
    return {(row["model"], int(row["seed"]), budgets.index(int(row["tokens"]))): row for row in found}


@pytest.fixture(scope="module")
def gap(made):
    """The difference to a seed of the reference in each domain, on curves through the finished models."""
    interpolate = pytest.importorskip("scipy.interpolate", reason="scipy is not installed: pip install scipy")

    def of(name, seed, other, straight=False):
        def curve(x, y):
            return interpolate.interp1d(x, y, axis=0) if straight else interpolate.PchipInterpolator(x, y)

        one, reference = ends(made[0], name, seed), ends(made[0], REFERENCE, other)
        reference = reference[: len(one)]
        floor = max(one[:, 0].min(), reference[:, 0].min())
        at = [curve(models[::-1, 0], models[::-1, 1:])(floor) for models in (one, reference)]
        return at[0] - at[1]

    return of


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def ends(folder, name, seed):
    """In-domain loss and losses of the domains of a run's finished models, `[models, 6]`, from its curves."""
    found = []
    for end in ENDS:
        run = folder / "runs" / name / f"seed_{seed}" / end
        if json.loads((run / "run.json").read_text())["status"] == "finished":
            last = [row for row in rows(run / "curves.csv") if row["loss/in_domain"]][-1]
            found.append([float(last[tag]) for tag in ("loss/in_domain", *(f"loss/ood/{each}" for each in DOMAINS))])
    return np.array(found)


def facts(folder, name, seed=0, file="run.json"):
    return json.loads((folder / "runs" / name / f"seed_{seed}" / file).read_text())


def test_the_table_is_what_the_commands_print(made):
    assert made[1].splitlines() == GAPS
    assert len(GAPS) == 7


def test_the_pages_of_the_mixers_repeat_the_table():
    cells = {line.split("`")[1]: line.split(" | ") for line in GAPS[2:]}
    pages = {name: (ZOO / f"pages/{name}.md").read_text(encoding="utf-8") for name in ("gated_attention", "fla_layer")}
    columns = (
        (GATED, 4, "gated_attention"),
        (GLA, 4, "fla_layer"),
        (FORGETTING, 4, "fla_layer"),
        (HGRN2, 3, "fla_layer"),
    )
    assert all(cells[name][column] in pages[page] for name, column, page in columns)


def test_the_losses_are_those_of_the_records(losses):
    def line(name):
        seeds = {seed for model, seed, _ in losses if model == name}

        def cell(column, budget, digits):
            known = [losses[name, seed, budget] for seed in seeds if (name, seed, budget) in losses]
            return f"{mean(float(row[column]) for row in known):.{digits}f}" if known else "-"

        cells = [cell(column, budget, 3) for column in ("in_domain", "ood") for budget in range(3)]
        return f"| `{name}` | {len(seeds)} | {' | '.join(cells)} | {cell('copying', 2, 2)} |"

    assert [line(name) for name in (REFERENCE, FORGETTING, GATED, HGRN2, GLA, ASSOCIATIVE)] == LOSSES[2:]


def test_the_checks_are_what_scipy_makes_of_the_curves(gap):
    def line(name, seeds):
        others = [1 - seed for seed in seeds]
        means = [
            mean(gap(name, *pair, straight).mean() for pair in zip(seeds, other, strict=True))
            for other, straight in ((seeds, False), (seeds, True), (others, False))
        ]
        return f"| `{name}` | {' | '.join(f'{each:+.3f}' for each in means)} |"

    assert [line(name, (0, 1) if name == ASSOCIATIVE else (0,)) for name in (*SINGLE[:3], ASSOCIATIVE, GLA)] == CHECKS[
        2:
    ]


def test_gaps_by_seed_and_domain_are_those_of_scipys_cubics(made, gap):
    """What the bullets and the checks say of the last budget."""
    pairs = np.stack([gap(ASSOCIATIVE, seed, seed) for seed in (0, 1)])
    assert pairs.min() > 0
    said = {
        ASSOCIATIVE: [f"worse by {pairs.mean():+.3f} ± ", f"({pairs[0].mean():+.3f} and {pairs[1].mean():+.3f})"],
        GLA: [f"worse by {gap(GLA, 0, 0).mean():+.3f} ± "],
        HGRN2: [f"one gap: {gap(HGRN2, 0, 0).mean():+.3f} at 85M tokens"],
    }
    for name, gaps in ((ASSOCIATIVE, pairs.mean(axis=0)), (GLA, gap(GLA, 0, 0)), (HGRN2, gap(HGRN2, 0, 0))):
        low, high = DOMAINS[gaps.argmin()], DOMAINS[gaps.argmax()]
        assert gaps.min() > 0
        said[name].append(f"from {gaps.min():+.3f} on `{low}` to {gaps.max():+.3f} on `{high}`")
    for name, texts in said.items():
        assert all(text in BULLETS[name] for text in texts), (name, texts)
    third, seeds = [gap(ASSOCIATIVE, 2, other).mean() for other in (0, 1)], gap(REFERENCE, 1, 0).mean()
    assert f"gives {third[0]:+.3f} and {third[1]:+.3f}" in PROSE
    assert f"Transformer++ has {seeds:+.3f} next to the first" in PROSE
    below = {name: {d for d, value in zip(DOMAINS, gap(name, 0, 0), strict=True) if value < 0} for name in SINGLE}
    assert below == {FORGETTING: {"arxiv", "github", "speech"}, GATED: {"github"}, GLA: set(), HGRN2: set()}
    assert f"none by more than {gap(GATED, 0, 0).max():.3f}" in BULLETS[GATED]


def test_three_gaps_keep_their_sign_with_any_rising_curve(made):
    """A model with the lower in-domain loss and the higher OOD loss."""

    def above(name, seed, other, budget):
        one, reference = ends(made[0], name, seed)[-1], ends(made[0], REFERENCE, other)[budget]
        assert one[0] < reference[0]
        return one[1:] - reference[1:]

    associative = [above(ASSOCIATIVE, seed, seed, 0).mean() for seed in (0, 1)]
    linear, hgrn2 = ([above(name, 0, other, 1) for other in (0, 1)] for name in (GLA, HGRN2))
    assert min(np.min(linear), np.min(hgrn2)) > 0, "all domains"
    for said in (
        f"by {associative[0]:.3f} and {associative[1]:.3f} than its pairs after 43M",
        f"by {linear[0].mean():.3f} than its pair after 85M",
        f"after 85M by {hgrn2[0].mean():.3f}.",
        f"gives {linear[1].mean():.3f} and {hgrn2[1].mean():.3f} for these two",
    ):
        assert said in PROSE, said
    assert f"OOD loss is higher by {hgrn2[0].mean():.3f}" in BULLETS[HGRN2]


def test_intervals_and_parts_are_those_of_the_tables(made):
    """What the bullets say of `gaps.csv`."""
    gaps = {(row["run"], row["tokens"][:3], row["domain"]): row for row in rows(made[0] / "tables/gaps.csv")}

    def width(name, kind):
        row = gaps[name, "170", kind]
        return f"{float(row['gap']):+.3f} ± {float(row['high']) - float(row['gap']):.3f}"

    for name, budget in ((FORGETTING, "170"), (GATED, "170"), (HGRN2, "850")):
        row = gaps[name, budget, "mean"]
        assert f"from {float(row['low']):+.3f} to {float(row['high']):+.3f}." in BULLETS[name]
    assert f"the gap was {float(gaps[GLA, '850', 'mean']['gap']):+.3f} at 85M" in BULLETS[GLA]
    for name in (GLA, ASSOCIATIVE):
        assert f"worse by {width(name, 'mean')}" in BULLETS[name]
    assert f"Recallable tokens have {width(GLA, 'mean, recallable tokens')}." in BULLETS[GLA]
    assert f"Other tokens have {width(GLA, 'mean, other tokens')}," in BULLETS[GLA]
    others = {
        row["run"]: row
        for row in rows(ZOO.parents[1] / "docs/results/budgets/gaps.csv")
        if row["tokens"][:3] == "170" and row["domain"] == "mean, recallable tokens"
    }
    rwkv7, delta_net, mamba2 = (float(others[name]["gap"]) for name in ("rwkv7", "delta_net", "mamba2"))
    assert f"RWKV-7 {rwkv7:+.3f}, DeltaNet {delta_net:+.3f} and Mamba-2 {mamba2:+.3f}," in BULLETS[GLA]
    assert f"from {float(gaps[ASSOCIATIVE, '850', 'mean']['gap']):+.3f} at 85M tokens" in BULLETS[ASSOCIATIVE]


def test_losses_copies_and_sizes_are_those_of_the_records(made, losses):
    def value(column, name, budget, seed=0):
        return float(losses[name, seed, budget][column])

    def both(column, name, budget, digits):
        return [f"{value(column, each, budget):.{digits}f}" for each in (name, REFERENCE)]

    own, pair = both("in_domain", FORGETTING, 2, 3)
    assert f"in-domain loss is {own}, and its pair has {pair}" in BULLETS[FORGETTING]
    own, pair = both("in_domain", GATED, 2, 3)
    assert f"at the end {own}, and its pair has {pair}" in BULLETS[GATED]
    assert all(value("in_domain", GATED, k) < value("in_domain", REFERENCE, k, s) for k in range(3) for s in (0, 1))
    own, pair = both("in_domain", HGRN2, 1, 3)
    assert f"lower than its pair's, {own} and {pair}" in BULLETS[HGRN2]
    for name, budget in ((GLA, 2), (HGRN2, 1)):
        own, pair = both("copying", name, budget, 2)
        assert f"saves {own} nats by copying, and its pair saves {pair}" in BULLETS[name]
    own, pair = (LOSSES[row].rstrip(" |").rpartition(" ")[2] for row in (-1, 2))
    assert f"saves {own} nats by copying, and Transformer++ saves {pair}." in BULLETS[ASSOCIATIVE]
    assert all(value("copying", REFERENCE, 0, s) < 0.2 and value("copying", REFERENCE, 1, s) > 1 for s in (0, 1))
    sizes = {name: facts(made[0], name) for name in (REFERENCE, GATED, GLA, HGRN2)}
    more = sizes[GATED]["parameters"] / sizes[REFERENCE]["parameters"] - 1
    assert f"{more:.1%} more parameters".replace("%", " %") in BULLETS[GATED]
    state = sizes[GLA]["state_elements"]
    share = f"{state / sizes[REFERENCE]['state_elements']:.1%}".replace("%", " %")
    assert f"state has {state:,} numbers, {share} of the reference's cache" in BULLETS[GLA]
    step = rows(made[0] / "runs" / HGRN2 / "seed_0/curves.csv")[-1]["step"]
    assert f"after step {int(step):,} of {sizes[HGRN2]['max_steps']:,}" in BULLETS[HGRN2]
    assert sizes[HGRN2]["status"] == "stopped"


def test_the_minutes_are_those_of_the_records(made):
    minutes = {
        path.parts[-3:-1]: json.loads(path.read_text())["minutes"] for path in (made[0] / "runs").glob("*/*/exam.json")
    }
    later = [minutes.pop((name, "seed_0")) for name in (GATED, GLA, HGRN2)]
    assert f"a run took {min(minutes.values()):.1f} to {max(minutes.values()):.1f} minutes" in PROSE
    assert f"`{GATED}` then took {later[0]:.1f} minutes and `{GLA}` {later[1]:.1f}" in PROSE


def test_the_two_linear_layers_of_fla_had_no_short_convolution(made):
    layers = pytest.importorskip("fla.layers", reason="flash-linear-attention is not installed")
    for name in (GLA, HGRN2):
        config = yaml.safe_load((made[0] / "runs" / name / "seed_0/config.yaml").read_text())
        options = config["model"]["mixers"]["mixer"]["init_args"]
        layer = getattr(layers, options["layer"])
        assert options["options"] is None
        assert inspect.signature(layer).parameters["use_short_conv"].default is False
        assert "`use_short_conv" in BULLETS[name]


def test_runs_of_a_seed_trained_on_the_same_batches_and_were_measured_on_the_same_text(made):
    """A hard batch raises the loss of all models that see it."""

    def steps(name, seed):
        return {
            int(row["step"]): float(row["loss/train"])
            for row in rows(made[0] / "runs" / name / f"seed_{seed}/curves.csv")
            if row["loss/train"]
        }

    first = {name: steps(name, 0) for name in (REFERENCE, ASSOCIATIVE, *SINGLE)} | {"other": steps(REFERENCE, 1)}
    common = [step for step in sorted(set.intersection(*map(set, first.values()))) if step >= 300]
    changes = {name: np.diff([losses[step] for step in common]) for name, losses in first.items()}
    mixers = (ASSOCIATIVE, *SINGLE)
    same, other = ([np.corrcoef(changes[name], changes[to])[0, 1] for name in mixers] for to in (REFERENCE, "other"))
    assert f"by at least {math.floor(min(same) * 100) / 100:.2f}." in PROSE
    assert f"by at most {math.ceil(max(other) * 100) / 100:.2f}." in PROSE
    documents = [
        np.load(made[0] / "runs" / name / "seed_0/evaluations/step_00000649.npz") for name in first if name != "other"
    ]
    tags = [tag for tag in documents[0].files if tag.startswith("document/")]
    assert len(tags) == 6
    assert all((each[tag] == documents[0][tag]).all() for each in documents for tag in tags)
    assert all(
        facts(made[0], name)["unigram_entropy"] == facts(made[0], REFERENCE)["unigram_entropy"] for name in mixers
    )
