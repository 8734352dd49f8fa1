"""Synthetic run folders that look like real ones: a loss that falls as a power of the tokens, with noise."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

DOMAINS = ("code", "legal")


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

    With `level` the in-domain loss is the same at every step.

    The last domains of a `mix` have the shares 0.1, the first what is left. Their hold-outs' losses lie `gap` above a
    common curve, the first's as far below it as the mix needs.
    """
    random = np.random.default_rng([seed, len(name), sum(map(ord, name))])
    folder.mkdir(parents=True, exist_ok=True)
    ood = [f"loss/ood/{domain}" for domain in domains]
    entropy = [f"{entropy_tag}/layer_{layer:02d}" for layer in range(layers)]
    trained = [f"loss/in_domain/{domain}" for domain in mix]
    shares = dict.fromkeys(mix[1:], 0.1) | {mix[0]: 1 - 0.1 * len(mix[1:])}
    tags = ["step", "tokens", "loss/train", "loss/in_domain", *trained, "loss/ood", *ood, *entropy]
    rows = []
    for step in range(1, steps + 1):
        tokens = step * tokens_per_step
        loss = 1.55 + 3.9 * (1 + speed * step / 14) ** -0.75
        if step % 4:
            continue
        row = {"step": step, "tokens": tokens, "throughput/tokens_per_second": 21000.0}
        row["loss/train"] = loss + random.normal() * 0.06
        if step % every == 0:
            inside = (loss + 0.02 if level is None else level) + random.normal() * noise
            row["loss/in_domain"] = inside
            for i, tag in enumerate(trained[1:]):
                row[tag] = 0.3 + (0.7 + 0.1 * i) * inside + gap + random.normal() * noise
            row[trained[0]] = (inside - 0.1 * sum(row[tag] for tag in trained[1:])) / shares[mix[0]]
            for i, tag in enumerate(ood):
                row[tag] = 0.8 + (0.87 - 0.08 * i) * inside + gap * (1 + 0.3 * i) + random.normal() * noise
            if ood:
                row["loss/ood"] = float(np.mean([row[tag] for tag in ood]))
            for layer, tag in enumerate(entropy):
                row[tag] = 1.2 + 3 * np.exp(-(layer + 1) * step / 250 / (1 + layer % 3)) + random.normal() * 0.02
        rows.append(row)
    with (folder / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*tags, "throughput/tokens_per_second"])
        writer.writeheader()
        writer.writerows(rows)
    described = {
        "name": name,
        "status": "finished",
        "mixers": {"mixer": "Attention"},
        "pattern": ["mixer"],
        "parameters": 1_650_000,
        "seed": seed,
        "max_steps": steps,
        "tokenizer": "byte",
        "train": shares,
        "ood": list(domains),
        "unigram_entropy": {"docs": 3.125},
        "versions": {"seqarch": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "lightning": "2.6.4", "triton": None},
        "hardware": {"device": "CPU", "devices": 1},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "started": "2026-11-21T03:00:00+00:00",
        "finished": "2026-11-21T03:03:00+00:00",
    }
    (folder / "run.json").write_text(json.dumps({**described, **(facts or {})}), encoding="utf-8")
    config = f"seed_everything: {seed}\nmodel:\n  d_model: 128\n  n_layers: {layers}\n  mixers: {{mixer: {name!r}}}\n"
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    return folder
