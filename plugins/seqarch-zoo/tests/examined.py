"""Reads the runs of the zoo's exam, and the tables of seqarch's own results."""

import csv
import json
import math
import re
from pathlib import Path
from statistics import mean, stdev, variance

import numpy as np
import pytest
import yaml

ZOO = Path(__file__).parents[1]
DOMAINS = ("arxiv", "github", "speech", "stack", "wiki")
REFERENCE = "transformer_pp"
FOX, GA, KDA = "FlaLayer-ForgettingAttention", "GatedAttention", "KimiDeltaAttention"
MLSTM, TTT, MAMBA3, DLR, S4D, MESA = "MLSTM", "TTTLinear", "Mamba3", "DLR", "S4D", "MesaNet"
HGRN2, GAM, GLA = "FlaLayer-HGRN2Attention", "GatedAssociative", "FlaLayer-GatedLinearAttention"
ENDS = ("branches/step_00000649", "branches/step_00001298", ".")
"""Folders of the finished models of a run, by rising tokens."""


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run_of(folder, name, seed=0):
    return folder / "runs" / name / f"seed_{seed}"


def ends(folder, name, seed):
    """In-domain loss and losses of the domains of a run's finished models, `[models, 6]`, from its curves."""
    found = []
    for run in (run_of(folder, name, seed) / end for end in ENDS):
        if json.loads((run / "run.json").read_text())["status"] == "finished":
            last = [row for row in rows(run / "curves.csv") if row["loss/in_domain"]][-1]
            found.append([float(last[tag]) for tag in ("loss/in_domain", *(f"loss/ood/{each}" for each in DOMAINS))])
    return np.array(found)


def by_step(run, tag):
    """A value of a run by its step."""
    return {int(row["step"]): float(row[tag]) for row in rows(run / "curves.csv") if row[tag]}


def results(folder, name, tokens, domain):
    """A row of the gaps in seqarch's own results."""
    found = rows(ZOO.parents[1] / "docs/results" / folder / "gaps.csv")
    (row,) = [row for row in found if (row["run"], row["tokens"][:3], row["domain"]) == (name, tokens, domain)]
    return row


def facts(folder, name, seed=0):
    return json.loads((run_of(folder, name, seed) / "run.json").read_text())


def model(folder, name):
    return yaml.safe_load((run_of(folder, name) / "config.yaml").read_text())["model"]


def options(folder, name):
    return model(folder, name)["mixers"]["mixer"]["init_args"]


def short(rate):
    """A learning rate as the texts write it."""
    return re.sub(r"\.?0*e-0", "e-", rate)


def ends_of(cell):
    """The ends of an interval in the README's table."""
    middle, half = map(float, cell.split(" ± "))
    return middle - half, middle + half


def correlation(folder, name, seed, other):
    """Correlate the changes of two training losses after warm-up: a hard batch raises both if both models see it."""
    one, two = (by_step(run, "loss/train") for run in (run_of(folder, name, seed), run_of(folder, REFERENCE, other)))
    steps = [step for step in sorted(one.keys() & two.keys()) if step >= 300]
    return np.corrcoef([np.diff([of[step] for step in steps]) for of in (one, two)])[0, 1]


def elsewhere():
    """Numbers of seqarch's own results."""
    others = {
        name: results("budgets", name, "170", "mean, recallable tokens") for name in ("rwkv7", "delta_net", "mamba2")
    }
    moved = [results("budgets", "delta_net", tokens, "mean") for tokens in ("170", "340")]
    ladder = [row for row in rows(ZOO.parents[1] / "docs/results/budgets/ladder.csv") if row["model"] == "mamba2"]
    return {
        "others": {name: f"{float(row['gap']):+.3f}" for name, row in others.items()},
        "moved": [f"{float(row['gap']):+.3f}" for row in moved],
        "mamba2": short(min(ladder, key=lambda row: float(row["in_domain"]))["rate"]),
    }


def between_seeds(gap):
    """What the deviation between seeds rests on, and pairs with other seeds."""
    t = pytest.importorskip("scipy.stats").t
    pairs = [np.array([gap(name, seed, seed).mean() for seed in (0, 1)]) for name in (GA, GAM)]
    pooled = mean(map(variance, pairs))
    centred = [each - each.mean() for each in pairs]
    shared = np.clip((centred[0] * centred[1]).sum() / 2 / pooled, 0.5, 1)
    freedom = 2 / (1 + shared**2)
    student = float(t.ppf(0.975, freedom))
    moves = 2 * (1 - 1 / 2) * 0.5**2 / (1 + 0.5**2)  # the share of one pair's variance that moves with the deviation
    return {
        "deviation": math.sqrt(pooled),
        "freedom": freedom,
        "student": student,
        "one_pair": math.sqrt((1 - moves) * student**2 + moves * t.ppf(0.975, np.inf) ** 2),
        "of_three": stdev([gap(GAM, seed, 0).mean() for seed in range(3)]),
        "third": [gap(GAM, 2, other).mean() for other in (0, 1)],
        "seeds": (seeds := gap(REFERENCE, 1, 0).mean()),
        "close": abs(seeds),
    }


def trained_twice(folder, gap):
    """The two runs of one mixer with one seed."""
    twice = [gap(KDA, 0, 0, models=2, folder=where).mean() for where in ("repeated", ".")]
    trained = [by_step(run_of(folder / where, KDA), "loss/train") for where in ("repeated", ".")]
    apart = {step: abs(loss - trained[1][step]) for step, loss in trained[0].items()}
    return {
        "twice": twice,
        "apart": abs(twice[0] - twice[1]),
        "alike": max(step for step in apart if all(value < 0.001 for at, value in apart.items() if at <= step)),
        "later": max(apart.values()),
    }


def norms(folder, name, seed=0):
    """The gradient's norm before clipping by step, after step 500."""
    return {step: norm for step, norm in by_step(run_of(folder, name, seed), "gradient_norm").items() if step > 500}


def largest_rise(folder, name, seed=0):
    """The largest rise of a training loss, less its Transformer++'s, between rows of the curves after step 500."""
    runs = run_of(folder, name, seed), run_of(folder, REFERENCE, seed)
    one, two = (by_step(run, "loss/train") for run in runs)
    assert one.keys() == two.keys()
    return np.diff([one[step] - two[step] for step in sorted(one) if step >= 500]).max()


def stable(folder, seeds):
    """The runs, by the seeds of each mixer: the largest norms of their gradients, and the largest rise."""
    highest = {name: max(max(norms(folder, name, seed).values()) for seed in seeds[name]) for name in seeds}
    highest[REFERENCE] = max(max(norms(folder, REFERENCE, seed).values()) for seed in (0, 1))
    clip = yaml.safe_load((run_of(folder, GLA) / "config.yaml").read_text())["trainer"]["gradient_clip_val"]
    assert [name for name in seeds if highest[name] > clip] == [GLA]
    logged = list(norms(folder, GLA).values())
    return {
        "rises": max(largest_rise(folder, name, seed) for name in seeds for seed in seeds[name]),
        "norms": highest,
        "clip": clip,
        "above": sum(norm > clip for norm in logged),
        "logged": len(logged),
        "highest": highest[GLA],
    }
