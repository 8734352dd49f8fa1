"""The numbers of the zoo's exam are what its commands make of the records, and what SciPy makes of the curves."""

import inspect
import json
import math
import re
import runpy
import shlex
import subprocess
import sys
from datetime import datetime
from functools import partial
from statistics import mean, median

import numpy as np
import pytest
from examined import (
    DLR,
    DOMAINS,
    FOX,
    GA,
    GAM,
    GLA,
    HGRN2,
    KDA,
    MAMBA3,
    MESA,
    MLSTM,
    REFERENCE,
    S4D,
    TTT,
    ZOO,
    between_seeds,
    by_step,
    correlation,
    elsewhere,
    ends,
    ends_of,
    facts,
    model,
    options,
    results,
    rows,
    run_of,
    short,
    stable,
    trained_twice,
)

TEXT = (ZOO / "README.md").read_text(encoding="utf-8")
README = TEXT.split("## The exam at `small`\n")[1].split("\n## ")[0]
PAGE = (ZOO / "pages/exam_small.md").read_text(encoding="utf-8").partition("\n\n")[2]
TABLES = re.findall(r"(?:^\|.*\n)+", README + PAGE, flags=re.MULTILINE)
GAPS, LOSSES, CHECKS = (
    {row.split("`")[1]: [cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]}
    for table in TABLES
)
PROSE = " ".join(re.sub(r"(?m)^\|.*|```[^`]*```", "", README + PAGE).split())
GROUPS = {
    part.partition("\n")[0]: {text.split("`")[1]: " ".join(text.split()) for text in part.split("* **")[1:]}
    for part in PAGE.partition("## Losses")[0].split("\n### ")[1:]
}
"""What the page says of each mixer, by its group."""
RECURRENT = (MLSTM, KDA, TTT, MAMBA3, HGRN2, GLA, DLR, S4D)
COUNT = dict(enumerate(["three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"], 3))
SEEDS = {name: range(int(row[1])) for name, row in GAPS.items()}
"""The seeds of each mixer that have a pair."""

PARTS = "tokens have {recall}. Other tokens have {other}, which"
FALLS = "The verdict is not settled, because the gap still falls, from {before} at 85M tokens."
GROWS = "The verdict is not settled, because the gap still grows, from {before} at 85M tokens."
SAID = {
    MESA: ["has {gap}, and the gap has settled. Recallable tokens have {recall}. Other tokens have {other}. All"],
    FOX: ["has {gap}.", "texts have {length:,} tokens"],
    GA: ["from {before} at 85M tokens to {gap} (pairs: {pairs}).", "With {more:.1f} % more parameters"],
    KDA: ["worse by {gap}, and", PARTS],
    TTT: ["worse by {gap}, and", PARTS],
    MAMBA3: ["worse by {gap}. " + FALLS, PARTS, "with {more:.1f} % more parameters"],
    HGRN2: ["worse by {gap}, and", PARTS],
    GLA: ["worse by {gap}. " + GROWS, PARTS],
    GAM: [
        "worse by {gap} (pairs: {pairs}). " + GROWS,
        "worse too, by {other}. It cannot recall: eight convolutions of three tokens see {reach} tokens.",
    ],
    S4D: [
        "worse by {gap}. " + GROWS,
        "tokens have {recall}. Other tokens are worse too, barely, by {other}.",
        "It has {fewer:.1f} % fewer parameters",
        "of `S4D` is {behind[0]:.3f} higher at 43M tokens and {behind[2]:.3f} higher at 170M.",
    ],
    DLR: ["worse by {gap}. " + GROWS, "tokens have {recall}. Other tokens are worse too, by {other}."],
    MLSTM: [
        "worse by {gap}, and the gap has settled. The interval begins at {low:+.3f}, so",
        PARTS,
        "It has the second lowest in-domain loss, with {more:.1f} % more parameters",
    ],
    "": [
        "{worse} of {all} recurrent mixers are worse. Their states have "
        "1/{parts[0]:.0f} (`MLSTM`), 1/{parts[1]:.0f} (`KimiDeltaAttention`), "
        "1/{parts[2]:.0f} (`TTTLinear`), 1/{parts[3]:.0f} (`Mamba3`), 1/{parts[4]:g} (HGRN2), "
        "1/{parts[5]:g} (gated linear attention), 1/{parts[6]:g} (`DLR`) and 1/{parts[7]:g} (`S4D`) of the numbers in",
        "The {settled} settled gaps of these mixers fell",
        "`MesaNet` is the ninth. Its state has 1/{mesa:.0f} of the numbers too,",
        "of these {recurrent}.",
        "Only two of the {recurrent} have a short",
        "RWKV-7 {others[rwkv7]}, DeltaNet {others[delta_net]} and Mamba-2 {others[mamba2]},",
        "by {fell[0]:.3f} (HGRN2) to {fell[1]:.3f} (`MLSTM`).",
        "{twice[0]:+.3f} in the first run and {twice[1]:+.3f} in the second. The difference of {apart:.3f} comes",
        "differ by less than 0.001 in the first {alike} steps, and by up to {later:.3f} later.",
        "the gap of DeltaNet moved between these two budgets from {moved[0]} to {moved[1]}, within the interval.",
        "results is {mamba2}.",
        "by at least {same:.2f}. With the other seed they correlate by at most {different:.2f}.",
        "rises by at most {rises:.3f} between two rows",
        "at most {norms[S4D]:.2f} for `S4D`, {norms[DLR]:.2f} for `DLR` and {norms[transformer_pp]:.2f} for",
        "norms above {clip:g}, in {above} of {logged} rows, up to {highest:.2f}. Larger gradients",
        "are clipped to {clip:g},",
        "Transformer++ has {seeds:+.3f} next to the first, so gaps of about {close:.2f} ",
        "it gives {third[0]:+.3f} and {third[1]:+.3f}.",
        "have the rate {rate},",
        "leaves {freedom:.1f} degrees of freedom. Student's t then multiplies the deviation by {student:.1f}.",
        "makes [their factor](../../../docs/exam.md#between-finished-models) {one_pair:.1f}.",
        "It is {deviation:.3f} at 170M tokens.",
        "next to one seed of Transformer++ have {of_three:.3f}.",
        "has {heads} heads",
        "each with {tokens:.0f}M tokens.",
        "tokens are at {tokens:.0f}M tokens.",
        "trained for {tokens:.0f}M tokens.",
        "`S4D` had a whole H200 for {whole[0]:.1f} minutes, and `MesaNet` an H100 for {whole[1]:.1f} minutes.",
        "took {minutes[0]:.1f} to {minutes[1]:.1f} minutes.",
    ],
}
"""What the page says of each mixer, and at the end of all of them, with the names of the numbers."""
NAMES = r"H200|HGRN2|RWKV-7|Mamba-2|abs/\d+\.\d+|s4d\.md|`\w+`"
NOT_MEASURED = rf"\b(?:43|85|170|340)M\b|95 %|step [35]00|above 0\.1|2k tok|{NAMES}"
"""Digits in the prose that are settings, names and addresses."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder that the README's first commands fill, and what the last of them prints; one run lies apart."""
    folder, printed = tmp_path_factory.mktemp("exam"), ""
    records = runpy.run_path(str(ZOO.parents[1] / "benchmarks/exam_records.py"))
    assert records["unpack"](ZOO / "benchmarks/exam_small/repeated", folder / "repeated/runs")
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
    """The difference to a seed of the reference in each domain, on curves through the finished models.

    `budgets` gives the gap after the first budgets, `models` leaves out later models.
    """
    interpolate = pytest.importorskip("scipy.interpolate", reason="scipy is not installed: pip install scipy")

    def of(name, seed, other, straight=False, budgets=None, models=None, folder="."):
        curve = partial(interpolate.interp1d, axis=0) if straight else interpolate.PchipInterpolator
        one = ends(made[0] / folder, name, seed)[:models]
        reference = ends(made[0], REFERENCE, other)[: len(one)]
        floor = max(side[:budgets, 0].min() for side in (one, reference))
        at = [curve(side[::-1, 0], side[::-1, 1:])(floor) for side in (one, reference)]
        return at[0] - at[1]

    return of


@pytest.fixture(scope="module")
def numbers(made, losses, gap):
    """The numbers in `SAID` that are not of one mixer."""
    folder = made[0]
    same, different = (
        [correlation(folder, name, seed, abs(seed - other)) for name in GAPS for seed in SEEDS[name]]
        for other in (0, 1)
    )
    took = {path: json.loads(path.read_text()).get("minutes") for path in folder.glob("runs/*/*/exam.json")}
    shared = [minutes for path, minutes in took.items() if minutes and path.parts[-3] not in (S4D, MESA)]
    (rate,) = {row["rate"] for row in losses.values()}
    (tokens,) = {max(int(row["tokens"]) for key, row in losses.items() if key[0] == name) for name in LOSSES}
    settled = [name for name in RECURRENT if GAPS[name][-1] == "worse"]
    fell = {gap(name, 0, 0, budgets=2).mean() - gap(name, 0, 0).mean(): name for name in settled}
    assert (fell[min(fell)], fell[max(fell)]) == (HGRN2, MLSTM)
    return {
        "recurrent": COUNT[len(RECURRENT)],
        "worse": COUNT[len(RECURRENT)].capitalize(),
        "all": COUNT[len((*RECURRENT, MESA))],
        "settled": COUNT[len(settled)],
        "length": facts(folder, FOX)["sequence_length"],
        "heads": options(folder, FOX)["options"]["num_heads"],
        "reach": 1 + len(facts(folder, GAM)["pattern"]) * (options(folder, GAM)["conv_size"] - 1),
        "mesa": facts(folder, REFERENCE)["state_elements"] / facts(folder, MESA)["state_elements"],
        "parts": [facts(folder, REFERENCE)["state_elements"] / facts(folder, e)["state_elements"] for e in RECURRENT],
        "tokens": tokens / 1e6,
        "fell": (min(fell), max(fell)),
        "same": math.floor(min(same) * 100) / 100,
        "different": math.ceil(max(different) * 100) / 100,
        "rate": short(rate),
        "minutes": (min(shared), max(shared)),
        "whole": [took[run_of(folder, name) / "exam.json"] for name in (S4D, MESA)],
        "behind": [float(losses[S4D, 0, k]["in_domain"]) - float(losses[DLR, 0, k]["in_domain"]) for k in range(3)],
        **(elsewhere() | between_seeds(gap) | trained_twice(folder, gap) | stable(folder, SEEDS)),
    }


def test_the_table_is_what_the_commands_print(made):
    assert made[1] == TABLES[0]


def test_the_prose_has_the_numbers_of_the_records_and_no_others(made, gap, numbers):
    bullets, left = {"": PROSE}, PROSE
    for group in GROUPS.values():
        bullets |= group
    assert set(bullets) == {"", *GAPS} == set(SAID)
    for name, texts in SAID.items():
        known = dict(numbers)
        if name:
            known |= zip(("before", "gap", "raw", "recall", "other"), GAPS[name][3:8], strict=True)
            known["low"] = ends_of(GAPS[name][4])[0]
            known["pairs"] = " and ".join(f"{gap(name, seed, seed).mean():+.3f}" for seed in SEEDS[name])
            known["more"] = 100 * (facts(made[0], name)["parameters"] / facts(made[0], REFERENCE)["parameters"] - 1)
            known["fewer"] = -known["more"]
        for text in (each.format(**known) for each in texts):
            assert text in bullets[name], f"{name}: {text}"
            left = left.replace(text, "")
    assert not re.findall(r".{0,40}\d.{0,20}", re.sub(NOT_MEASURED, "", left))


def test_the_pages_that_repeat_gaps_have_those_of_the_table():
    pages = {
        "plugins/seqarch-zoo/pages/gated_attention.md": [GA],
        "plugins/seqarch-zoo/pages/fla_layer.md": [FOX, HGRN2, GLA],
        "plugins/seqarch-zoo/pages/kimi_delta_attention.md": [KDA],
        "plugins/seqarch-zoo/pages/ttt_linear.md": [TTT],
        "plugins/seqarch-zoo/pages/mamba3.md": [MAMBA3],
        "plugins/seqarch-zoo/pages/mesa_net.md": [MESA],
        "plugins/seqarch-zoo/pages/mlstm.md": [MLSTM],
        "plugins/seqarch-zoo/pages/s4d.md": [S4D, DLR],
        "plugins/seqarch-zoo/pages/gated_associative.md": [GAM],
    }
    for page, mixers in pages.items():
        text = " ".join((ZOO.parents[1] / page).read_text(encoding="utf-8").split())
        assert re.findall(r"[+-]\d\.\d+ ± \d\.\d+", text) == [GAPS[name][4] for name in mixers]
        assert all(GAPS[name][-1].partition(":")[0] in text for name in mixers), page
        assert re.findall(r"(\d+)M tokens", text) == ["170"]


def test_the_papers_are_those_of_the_mixers():
    paper = r"\(https://arxiv\.org/abs/([\d.]+)\)"
    sources = dict(re.findall(rf"^\| \[`(\w+)`\].*?{paper}", TEXT, flags=re.MULTILINE))
    named = {name: re.findall(paper, said) for group in GROUPS.values() for name, said in group.items()}
    assert {name: papers for name, papers in named.items() if papers and name != FOX} == {
        name: [sources[name]] for name in (MESA, GA, MLSTM, KDA, TTT, MAMBA3)
    }


def test_mixers_are_counted_and_the_rest_is_named():
    for text in (README, (ZOO.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")):
        assert f"{COUNT[len(GAPS)].capitalize()} mixers of" in text
    others = README.partition("**Not examined")[2].partition("\n\n")[0]
    assert not [name for name in GAPS if f"`{name}`" in others]
    records = ZOO / "benchmarks/exam_small"
    table = (records / "README.md").read_text(encoding="utf-8").partition("| runs |")[2].partition("Their")[0]
    kept = {path.relative_to(records).as_posix().partition("-seed_")[0] for path in records.rglob("*.tar.xz")}
    assert set(re.findall(r"`(.*?)`", table)) == kept == {*LOSSES, f"repeated/{KDA}"}


def test_the_groups_are_those_of_the_verdicts(gap):
    said = {group: [(GAPS[name], name) for name in texts] for group, texts in GROUPS.items()}
    assert [row[-1] for row, _ in said.pop("No difference")] == ["no difference"] * 2
    for row, _ in said.pop("Still moving towards zero"):
        assert "still moving" in row[-1]
        assert abs(float(row[4].split()[0])) < abs(float(row[3].split()[0]))
    for row, name in said.pop("Worse on recallable tokens"):
        assert (row[-1] == "worse") == ("the gap has settled" in GROUPS["Worse on recallable tokens"][name])
        assert min(ends_of(row[4])[0], ends_of(row[6])[0]) > 0
        for seed in SEEDS[name]:
            domains = gap(name, seed, seed)
            order = [DOMAINS[k] for k in domains.argsort()]
            assert domains.min() > 0
            first, second = sorted(order[3:])
            assert f"most on `{first}` and `{second}`, least on `{order[0]}`." in PROSE
    for row, _ in said.pop("Barely worse"):
        assert row[-1] == "worse"
        assert ends_of(row[4])[0] > 0
        (recall, _), (low, high) = map(ends_of, row[6:8])
        assert low < 0 < high, "other tokens show no difference"
        assert recall > 0
    assert said == {"The recurrent mixers": []}


def test_what_the_page_says_without_numbers(made, losses, gap):
    below = {d for d, value in zip(DOMAINS, gap(FOX, 0, 0), strict=True) if value < 0}
    assert below == {"arxiv", "github", "speech"}
    assert {d for d, value in zip(DOMAINS, gap(MESA, 0, 0), strict=True) if value > 0} == {"wiki"}
    assert ends_of(GAPS[MESA][6])[0] < 0 < ends_of(GAPS[MESA][6])[1], "no difference, even on recallable tokens"
    copied = {name: float(row[-1]) for name, row in LOSSES.items()}
    assert max(copied[name] for name in RECURRENT) < copied[MESA] < copied[REFERENCE]
    assert gap(MLSTM, 0, 0).min() > 0
    in_domain = {key: float(row["in_domain"]) for key, row in losses.items()}
    assert sorted(in_domain, key=in_domain.__getitem__)[:2] == [(MAMBA3, 0, 2), (MLSTM, 0, 2)]
    assert all(in_domain[GA, seed, 2] < in_domain[REFERENCE, seed, 2] for seed in (0, 1))
    for name in {*RECURRENT, GAM}:
        low, high = ends_of(GAPS[name][7])
        assert low < 0 < high or (low > 0 and name in (GAM, DLR, S4D)), "no difference, or worse too"
    assert model(made[0], MLSTM)["feed_forward"], "each block has a feed-forward layer"
    assert not model(made[0], MLSTM)["no_feed_forward"]
    assert {json.loads(path.read_text())["status"] for path in made[0].glob("runs/*/*/run.json")} == {"finished"}
    assert facts(made[0] / "repeated", KDA)["status"] == "stopped"
    assert len(ends(made[0] / "repeated", KDA, 0)) == 2, "straight lines are all that two budgets allow"
    configs = [(run_of(made[0] / where, KDA) / "config.yaml").read_text() for where in ("repeated", ".")]
    assert configs[0] == configs[1], "the same configuration and seed"


def test_what_twice_the_deviation_would_change(made, numbers):
    """The part of the documents does not double."""
    seeds, settled, half = numbers["one_pair"] * numbers["deviation"], {}, {}
    last = (
        row for row in rows(made[0] / "tables/gaps.csv") if row["domain"] == "mean"
    )  # the largest budget comes last
    for row in (row for row in last if "not settled" not in row["verdict"]):
        settled[row["run"]] = float(row["gap"])
        documents = (float(row["high"]) - float(row["gap"])) ** 2 - seeds**2
        half[row["run"]] = math.sqrt(4 * seeds**2 + documents)
    wide = {name for name, value in settled.items() if half[name] > max(0.1, abs(value) / 2)}
    assert wide == {MESA, FOX, MLSTM, KDA, TTT}
    assert set(settled) - wide == {HGRN2}
    assert settled[MLSTM] < half[MLSTM]
    assert all(half[name] < settled[name] for name in (KDA, TTT, HGRN2)), "they would still be above zero"


def test_what_the_page_says_of_the_recurrent_mixers(made, numbers):
    assert {*GROUPS["Worse on recallable tokens"], *GROUPS["Barely worse"]} == {*RECURRENT, GAM}
    *_, second, largest = sizes = sorted(RECURRENT, key=lambda name: facts(made[0], name)["state_elements"])
    final = {name: float(GAPS[name][4].split()[0]) for name in GAPS}
    assert (sizes[0], second, largest) == (GLA, DLR, min(RECURRENT, key=final.__getitem__)) == (GLA, DLR, MLSTM)
    for name, columns in ((GLA, [4]), (GAM, [4]), (S4D, [3, 4, 6, 7])):
        for (low, high), (value, _) in ((ends_of(GAPS[name][k]), GAPS[DLR][k].split(" ± ")) for k in columns):
            assert low < float(value) < high, "as large within the intervals"
    states = {name: facts(made[0], name)["state_elements"] for name in (S4D, GLA, DLR)}
    assert states[S4D] == states[GLA] == states[DLR] / 8
    assert re.search(r"`DLR` \|.*\| guesses .* do not depend on the text \|\n(?=\| `S4D` \|.* \| as DLR \|\n)", TEXT)
    lost = {name: float(GAPS[name][6].split()[0]) for name in RECURRENT}
    assert sorted(lost, key=lost.__getitem__)[:2] == [MLSTM, KDA]
    assert [key for key in options(made[0], MLSTM) if "conv" in key]
    assert options(made[0], KDA)["conv"] is True
    assert options(made[0], MESA)["conv_size"] > 1
    assert not [key for name in (TTT, MAMBA3, DLR, S4D) for key in options(made[0], name) if "conv" in key]
    least = max(map(float, numbers["others"].values()))
    assert f"than {COUNT[sum(value > least for value in lost.values())]} of these" in PROSE
    before, last = (results("budgets", "delta_net", tokens, "mean") for tokens in ("170", "340"))
    half = min(float(row["high"]) - float(row["gap"]) for row in (before, last))
    assert abs(float(before["gap"]) - float(last["gap"])) < half, "within the interval"


def test_the_speed_of_mamba3_is_that_of_its_last_steps(made):
    steps, least, most = re.findall(r"last (\d+) steps ran at ([\d,]+) to ([\d,]+) tokens per second", TEXT)[0]
    speeds = by_step(run_of(made[0], MAMBA3), "throughput/tokens_per_second")
    last = [speed for step, speed in speeds.items() if step > max(speeds) - int(steps)]
    assert (least, most) == (f"{int(min(last)):,}", f"{int(max(last)):,}")
    end, other = (datetime.fromisoformat(facts(made[0], name)["finished"]) for name in (MAMBA3, TTT))
    assert (end - other).total_seconds() > 60, "so TTTLinear ran no more: two of the runs that began at once were left"


def test_the_speeds_of_s4d_and_mesa_net(made):
    for name in (S4D, MESA):
        speed = median(by_step(run_of(made[0], name), "throughput/tokens_per_second").values())
        said = rf"`{name}` had an H[12]00 to itself in the exam, and its median speed was {speed:,.0f} tokens per"
        assert re.search(said, " ".join(TEXT.split())), name


def test_the_losses_are_those_of_the_records(losses):
    for name, row in LOSSES.items():
        seeds = {seed for model, seed, _ in losses if model == name}
        cells = [f"`{name}`", str(len(seeds))]
        columns = [(column, budget, 3) for column in ("in_domain", "ood") for budget in range(3)]
        for column, budget, digits in (*columns, ("copying", 2, 2)):
            known = [float(losses[name, seed, budget][column]) for seed in seeds if (name, seed, budget) in losses]
            cells.append(f"{mean(known):.{digits}f}" if known else "-")
        assert cells == row
    assert list(LOSSES) == [REFERENCE, *GAPS]
    budgets = [f"{round(int(losses[REFERENCE, 0, budget]['tokens']) / 1e6)}M" for budget in range(3)]
    assert re.findall(r"\d+M", TABLES[1].partition("\n")[0]) == 2 * budgets


def test_the_checks_are_what_scipy_makes_of_the_curves(made, gap):
    def least(name, seed):
        """The OOD loss above a model of the pair with a higher in-domain loss: a bound for any rising curve."""
        one, reference = ends(made[0], name, seed)[-1], ends(made[0], REFERENCE, seed)
        return max(one[1:].mean() - other[1:].mean() for other in reference if one[0] < other[0])

    for name, row in CHECKS.items():
        by_seed = [
            [*(gap(name, s, abs(s - o), straight).mean() for o, straight in ((0, 0), (0, 1), (1, 0))), least(name, s)]
            for s in SEEDS[name]
        ]
        assert [f"{each:+.3f}" for each in np.mean(by_seed, axis=0)] == row[1:]
        assert row[1] == GAPS[name][5], "the table's raw mean"
    assert list(CHECKS) == list(GAPS)


def test_the_two_linear_layers_of_fla_had_no_short_convolution(made):
    layers = pytest.importorskip("fla.layers", reason="flash-linear-attention is not installed")
    for name in (GLA, HGRN2):
        own = options(made[0], name)
        assert own["options"] is None, "fla's default options"
        assert inspect.signature(getattr(layers, own["layer"])).parameters["use_short_conv"].default is False
