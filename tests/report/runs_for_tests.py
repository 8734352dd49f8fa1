"""Synthetic run folders that look like real ones. The loss falls as a power of the tokens, with noise."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.report.findings import Findings
from seqarch.report.runs import check_losses, read_groups
from seqarch.runs.folder import branch_path, result_path
from seqarch.runs.results import Value, interval, write_result

DOMAINS = ("code", "legal")
RECORD = {
    "status": "finished",
    "mixers": {"mixer": "Attention"},
    "pattern": ["mixer"],
    "parameters": 1_650_000,
    "tokenizer": "byte",
    "unigram_entropy": {"docs": 3.125},
    "versions": {"seqarch": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "lightning": "2.6.4", "triton": None},
    "hardware": {"device": "CPU", "devices": 1},
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "started": "2026-11-21T03:00:00+00:00",
    "finished": "2026-11-21T03:03:00+00:00",
}
"""What `run.json` says about every run."""


def write_run(
    folder: Path,
    name: str,
    *,
    gap: float = 0.0,
    domains: tuple[str, ...] = DOMAINS,
    steps: int = 400,
    every: int = 20,
    tokens_per_step: int = 4096,
    speed: float = 1.0,
    layers: int = 4,
    noise: float = 0.004,
    level: float | None = None,
    seed: int = 0,
    entropy_tag: str = "entropy",
    mix: tuple[str, ...] = ("docs",),
    facts: dict[str, Any] | None = None,
) -> Path:
    """Writes a run folder whose OOD losses lie `gap` nats (then 1.3, 1.6 `gap`) above a curve common to all runs.

    With `level` the in-domain loss is the same at every step. All but the first domain of a `mix` have the share 0.1.
    The losses of their hold-outs lie `gap` above a common curve. The first domain's lies as far below as the mix needs.
    """
    random = np.random.default_rng([seed, len(name), sum(map(ord, name))])
    folder.mkdir(parents=True, exist_ok=True)
    shares = dict.fromkeys(mix[1:], 0.1) | {mix[0]: 1 - 0.1 * len(mix[1:])}
    entropy = [f"{entropy_tag}/layer_{layer:02d}" for layer in range(layers)]
    rows = []
    for step in range(4, steps + 1, 4):
        loss = 1.55 + 3.9 * (1 + speed * step / 14) ** -0.75
        row = {"step": step, "tokens": step * tokens_per_step, "throughput/tokens_per_second": 21000.0}
        row["loss/train"] = loss + random.normal() * 0.06
        if step % every == 0:
            inside = (loss + 0.02 if level is None else level) + random.normal() * noise
            row |= evaluation(random, inside, gap, noise, shares, mix, domains)
            for layer, tag in enumerate(entropy):
                row[tag] = 1.2 + 3 * np.exp(-(layer + 1) * step / 250 / (1 + layer % 3)) + random.normal() * 0.02
        rows.append(row)
    losses = [*(f"loss/in_domain/{each}" for each in mix), "loss/ood", *(f"loss/ood/{each}" for each in domains)]
    tags = ["step", "tokens", "loss/train", "loss/in_domain", *losses, *entropy, "throughput/tokens_per_second"]
    with (folder / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, tags)
        writer.writeheader()
        writer.writerows(rows)
    described = {"name": name, "seed": seed, "max_steps": steps, "train": shares, "ood": list(domains)}
    (folder / "run.json").write_text(json.dumps({**RECORD, **described, **(facts or {})}), encoding="utf-8")
    config = f"seed_everything: {seed}\nmodel:\n  d_model: 128\n  n_layers: {layers}\n  mixers: {{mixer: {name!r}}}\n"
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    return folder


def write_branched(folder: Path, name: str, branches: tuple[int, ...] = (100, 200), **options: Any) -> Path:
    """Writes a run with finished models of fewer steps."""
    run = write_run(folder, name, **options)
    for steps in branches:
        write_run(branch_path(run, steps), name, **{**options, "steps": steps})
    return run


def evaluation(
    random: np.random.Generator,
    inside: float,
    gap: float,
    noise: float,
    shares: dict[str, float],
    mix: tuple[str, ...],
    domains: tuple[str, ...],
) -> dict[str, float]:
    """The losses of a step with the in-domain loss `inside`, by tag."""
    row = {"loss/in_domain": inside}
    for i, name in enumerate(mix[1:]):
        row[f"loss/in_domain/{name}"] = 0.3 + (0.7 + 0.1 * i) * inside + gap + random.normal() * noise
    others = sum(row[f"loss/in_domain/{name}"] for name in mix[1:])
    row[f"loss/in_domain/{mix[0]}"] = (inside - 0.1 * others) / shares[mix[0]]
    ood = {}
    for i, name in enumerate(domains):
        ood[f"loss/ood/{name}"] = 0.8 + (0.87 - 0.08 * i) * inside + gap * (1 + 0.3 * i) + random.normal() * noise
    return {**row, **ood, **({"loss/ood": float(np.mean([*ood.values()]))} if ood else {})}


def load_groups(folders, domains=()):
    """The runs in some folders by name, whose losses can be compared."""
    groups = read_groups(folders, domains)
    check_losses(groups)
    return groups


def write_samples(run, task, samples, *, step=400, group="few_shot", chance=None, settings=None, sha256="a", **more):
    """A result file whose metrics are the means of the samples; `depth` is none."""
    metrics = {
        tag: Value(float(each.mean()), *interval(each), len(each), chance)
        for tag, each in samples.items()
        if tag != "depth"
    }
    facts = {"task": task, "group": group, "version": 1, "rows": {"where": "here", "sha256": {task: sha256}}}
    facts |= {"settings": settings or {}, "prefix": "eos", **more}
    write_result(result_path(run, step, task), facts, metrics, samples)


def write_capable(folder: Path, names: dict[str, float], domains: tuple[str, ...] = ("code", "legal")) -> Findings:
    """Models with everything that a figure can show, by their gaps."""
    runs = []
    for number, (name, gap) in enumerate(names.items()):
        tag, facts = "implied_entropy" if gap else "entropy", {"state_elements": 90_000 * 4**number}
        run = write_branched(folder / f"{number}", name, gap=gap, entropy_tag=tag, facts=facts, domains=domains)
        for length in (8192, 65536):
            found = {f"passkey/{length}/contains": np.ones(50), "depth": np.linspace(0, 1, 50)}
            write_samples(run, f"passkey_{length}", found, group="passkey", settings={"length": length})
        ranges = ("0-2048", "2048-8192", "8192-16384", "16384-32768", "32768-65536")
        losses = {f"loss_by_position/{d}/{each}": np.array([3, 2.9 + gap]) for d in ("books", "law") for each in ranges}
        write_samples(run, "long", losses, group="long")
        runs.append(run)
    return Findings.read(runs)
