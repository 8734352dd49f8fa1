"""Reads the runs of the zoo's exam, and the tables of seqarch's own results."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import yaml

ZOO = Path(__file__).parents[1]
DOMAINS = ("arxiv", "github", "speech", "stack", "wiki")
REFERENCE = "transformer_pp"
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
    moved = [
        results(where, name, tokens, "mean")
        for where, name in (("budgets", "delta_net"), ("budgets_two_domains", "mamba2"))
        for tokens in ("170", "340")
    ]
    ladder = [row for row in rows(ZOO.parents[1] / "docs/results/budgets/ladder.csv") if row["model"] == "mamba2"]
    return {
        "others": {name: f"{float(row['gap']):+.3f}" for name, row in others.items()},
        "moved": [f"{float(row['gap']):+.3f}" for row in moved],
        "mamba2": short(min(ladder, key=lambda row: float(row["in_domain"]))["rate"]),
    }
