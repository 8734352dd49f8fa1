"""`seqarch mixers --costs`: what each mixer takes at one width, by its own formulas."""

from __future__ import annotations

from typing import Any

import torch

from seqarch.cli.mixer_table import mixer_options
from seqarch.errors import UserError
from seqarch.mixers.base import CAPABILITIES, Mixer
from seqarch.mixers.registry import import_mixers
from seqarch.tables import markdown

N_LAYERS = 12
HEAD_DIM = 64
LENGTHS = (2048, 102400)
DEVICES = ("CPU", "CUDA")
COLUMNS = (
    "mixer",
    "parameters",
    "MFLOP 2k",
    "MFLOP 100k",
    "state KiB 2k",
    "state KiB 100k",
    *DEVICES,
    *CAPABILITIES,
    "source",
)


def mixer_costs(d_model: int = 768) -> list[dict[str, Any]]:
    """One row a mixer with the keys `COLUMNS`: means over the layers of a model of 12, a token forward, bf16 states.

    Mixers are built with their default options, on no device, and with `d_model / 64` heads where heads are required.
    `CPU` and `CUDA` say what computes it there. What a mixer does not have or say is `None`, and so are all numbers of
    one that needs further options.
    """
    if d_model < HEAD_DIM or d_model % HEAD_DIM:
        raise UserError(f"d_model must be a multiple of {HEAD_DIM}, not {d_model}")
    return [_costs(name, mixer, d_model) for name, mixer in sorted(import_mixers().items())]


def _costs(name: str, mixer: type[Mixer], d_model: int) -> dict[str, Any]:
    required = {option for option, facts in mixer_options(mixer).items() if facts["required"]}
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row.update({"mixer": name, **{ability: ability in mixer.capabilities for ability in CAPABILITIES}})
    row.update({device: mixer.kernels.get(device.lower()) for device in DEVICES}, source=mixer.source or None)
    if required - {"n_heads"}:
        return row
    heads = {"n_heads": d_model // HEAD_DIM} if required else {}
    with torch.device("meta"):
        layers = [mixer(d_model, index, N_LAYERS, **heads) for index in range(N_LAYERS)]
    row["parameters"] = round(sum(p.numel() for layer in layers for p in layer.parameters()) / N_LAYERS)
    for length, label in zip(LENGTHS, ("2k", "100k"), strict=True):
        row[f"MFLOP {label}"] = sum(layer.flops_per_token(length) for layer in layers) / N_LAYERS / 1e6
        if "decode" in mixer.capabilities:
            row[f"state KiB {label}"] = sum(layer.state_bytes(length) for layer in layers) / N_LAYERS / 1024
    return row


def cost_table(d_model: int = 768) -> str:
    """The rows as a Markdown table, which is readable in a terminal as well."""
    cells = [[_text(row[column]) for column in COLUMNS] for row in mixer_costs(d_model)]
    return "\n".join(markdown([COLUMNS, *cells]))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
