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

LARGEST = 2**20
"""The largest width: PyTorch cannot count the bytes of much larger matrices."""


def mixer_costs(d_model: int = 768) -> list[dict[str, Any]]:
    """One row per mixer with the keys `COLUMNS` and "counted": means over the 12 layers of a model.

    Operations are those of one token forward, states are bf16. Mixers are built on no device, with the options at which
    they were published at this width; otherwise with their defaults, and with `d_model / 64` heads where heads are
    required. `CPU` and `CUDA` say what computes it there. "counted" says that operations are counted, not given by a
    formula. What a mixer does not have or say is `None`, and so are all numbers of one that needs further options.
    """
    if not HEAD_DIM <= d_model <= LARGEST or d_model % HEAD_DIM:
        raise UserError(f"d_model must be a multiple of {HEAD_DIM} up to {LARGEST:,}, not {d_model}")
    return [_costs(name, mixer, d_model) for name, mixer in sorted(import_mixers().items())]


def _costs(name: str, mixer: type[Mixer], d_model: int) -> dict[str, Any]:
    required = {option for option, facts in mixer_options(mixer).items() if facts["required"]}
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row.update({"mixer": name, **{ability: ability in mixer.capabilities for ability in CAPABILITIES}})
    row["counted"] = False
    row.update({device: mixer.kernels.get(device.lower()) for device in DEVICES}, source=mixer.source or None)
    options = dict(mixer.published.get(d_model) or ({"n_heads": d_model // HEAD_DIM} if "n_heads" in required else {}))
    if required - options.keys():
        return row
    with torch.device("meta"):
        layers = [mixer(d_model, index, N_LAYERS, **options) for index in range(N_LAYERS)]
    row["counted"] = any(layer.flops_counted for layer in layers)
    row["parameters"] = round(sum(p.numel() for layer in layers for p in layer.parameters()) / N_LAYERS)
    for length, label in zip(LENGTHS, ("2k", "100k"), strict=True):
        row[f"MFLOP {label}"] = sum(layer.flops_per_token(length) for layer in layers) / N_LAYERS / 1e6
        if "decode" in mixer.capabilities:
            row[f"state KiB {label}"] = sum(layer.state_bytes(length) for layer in layers) / N_LAYERS / 1024
    return row


def cost_table(d_model: int = 768) -> str:
    """The rows as a Markdown table, which is readable in a terminal as well."""
    cells = [[_text(row[column]) + _mark(row, column) for column in COLUMNS] for row in mixer_costs(d_model)]
    return "\n".join(markdown([COLUMNS, *cells]))


def _mark(row: dict[str, Any], column: str) -> str:
    return " (counted)" if column.startswith("MFLOP") and row["counted"] else ""


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
