"""`seqarch mixers`: what is installed, with options, abilities and costs."""

import inspect
import shutil
import textwrap
import warnings
from typing import Any

import torch

from seqarch.errors import PluginWarning, UserError
from seqarch.mixers.base import CAPABILITIES, GIVEN_BY_THE_MODEL, Mixer
from seqarch.mixers.registry import import_mixers, mixer_entries
from seqarch.tables import markdown

NO_BREAK = "\N{NO-BREAK SPACE}"
N_LAYERS = 12
HEAD_DIM = 64
LENGTHS = {"2k": 2048, "100k": 102400}
DEVICES = ("CPU", "CUDA")
COSTS = [f"{cost} {length}" for cost in ("MFLOP", "state KiB") for length in LENGTHS]
COLUMNS = ("mixer", "parameters", *COSTS, *DEVICES, *CAPABILITIES, "source")

LARGEST = 2**20
"""The largest width: PyTorch cannot count the bytes of much larger matrices."""


def describe_mixers() -> list[dict[str, Any]]:
    """An entry per mixer: name, class, package, version, options with defaults, capabilities, kernels, source, summary.

    An option is `{"default": ..., "required": ...}`. Mixers that cannot be imported are left out with a warning.
    """
    classes = import_mixers()
    return [
        {
            "name": entry.name,
            "class": entry.target,
            "package": entry.package,
            "version": entry.version,
            "options": mixer_options(mixer),
            "capabilities": [name for name in CAPABILITIES if name in mixer.capabilities],
            "kernels": dict(mixer.kernels),
            "source": mixer.source,
            "summary": (inspect.getdoc(mixer) or "").split("\n\n")[0].replace("\n", " "),
        }
        for entry in mixer_entries()
        if (mixer := classes.get(entry.name))
    ]


def mixer_options(mixer: type) -> dict[str, dict[str, Any]]:
    """Each option of a mixer with its default, `None` where it is required."""
    options = {}
    for name, parameter in inspect.signature(mixer).parameters.items():
        if name not in GIVEN_BY_THE_MODEL and parameter.kind is not parameter.VAR_KEYWORD:
            required = parameter.default is parameter.empty
            options[name] = {"default": None if required else parameter.default, "required": required}
    return options


def mixer_table() -> str:
    """The list for the terminal: one paragraph per mixer, no line longer than the terminal is wide."""
    width = shutil.get_terminal_size((80, 24)).columns
    return "\n\n".join(_paragraph(mixer, width) for mixer in describe_mixers()) or "no mixer is installed"


def _paragraph(mixer: dict[str, Any], width: int) -> str:
    facts = {
        "class": mixer["class"],
        "package": f"{mixer['package']} {mixer['version']}",
        "options": ", ".join(_option(name, **option) for name, option in mixer["options"].items()) or "none",
        "can": ", ".join(mixer["capabilities"]) or "run whole sequences only",
        "kernels": "; ".join(f"{on.upper()}: {by}" for on, by in mixer["kernels"].items()) or "not given",
        "source": mixer["source"] or "not given",
    }
    lines = textwrap.wrap(f"{mixer['name']}: {mixer['summary']}", width, subsequent_indent="  ")
    for label, value in facts.items():
        indent = f"  {label:8} "
        indents: dict[str, Any] = {"initial_indent": indent, "subsequent_indent": " " * len(indent)}
        lines += textwrap.wrap(value, width, **indents, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(NO_BREAK, " ")


def _option(name: str, default: Any, required: bool) -> str:
    return (f"{name} (required)" if required else f"{name}={default}").replace(" ", NO_BREAK)


def mixer_costs(d_model: int = 768) -> list[dict[str, Any]]:
    """One row per mixer with the keys `COLUMNS` and "counted": means over the 12 layers of a model.

    Operations are those of one token forward, states are bf16. Mixers are built on no device, with the options at which
    they were published at this width; otherwise with their defaults, and with `d_model / 64` heads where heads are
    required. `CPU` and `CUDA` say what computes it there. "counted" says that the operations were counted, because
    the mixer has no formula. Missing facts are `None`, and so are the numbers of a mixer that needs further options
    or, with a warning, of one that raises an error.
    """
    if not HEAD_DIM <= d_model <= LARGEST or d_model % HEAD_DIM:
        raise UserError(f"d_model must be a multiple of {HEAD_DIM} up to {LARGEST:,}, not {d_model}")
    return [_costs(name, mixer, d_model) for name, mixer in sorted(import_mixers().items())]


def _costs(name: str, mixer: type[Mixer], d_model: int) -> dict[str, Any]:
    required = {option for option, facts in mixer_options(mixer).items() if facts["required"]}
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"mixer": name, "counted": False}
    row.update({ability: ability in mixer.capabilities for ability in CAPABILITIES})
    row.update({device: mixer.kernels.get(device.lower()) for device in DEVICES}, source=mixer.source or None)
    options = dict(mixer.published.get(d_model) or ({"n_heads": d_model // HEAD_DIM} if "n_heads" in required else {}))
    if required - options.keys():
        return row
    try:
        with torch.device("meta"):
            layers = [mixer(d_model, index, N_LAYERS, **options) for index in range(N_LAYERS)]
        costs: dict[str, Any] = {"counted": any(layer.flops_counted for layer in layers)}
        costs["parameters"] = round(sum(p.numel() for layer in layers for p in layer.parameters()) / N_LAYERS)
        for label, length in LENGTHS.items():
            costs[f"MFLOP {label}"] = sum(layer.flops_per_token(length) for layer in layers) / N_LAYERS / 1e6
            if "decode" in mixer.capabilities:
                costs[f"state KiB {label}"] = sum(layer.state_bytes(length) for layer in layers) / N_LAYERS / 1024
        row.update(costs)
    except Exception as error:  # a broken plug-in must not take every other with it
        warnings.warn(f"no costs of mixer {name}: {type(error).__name__}: {error}", PluginWarning, stacklevel=3)
    return row


def cost_table(d_model: int = 768) -> str:
    """The rows as a Markdown table, which is readable in a terminal as well."""
    cells = [[_text(row, column) for column in COLUMNS] for row in mixer_costs(d_model)]
    return "\n".join(markdown([COLUMNS, *cells]))


def _text(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        counted = row["counted"] and column.startswith("MFLOP")
        return f"{value:,.1f}{' (counted)' if counted else ''}"
    return f"{value:,}" if isinstance(value, int) else str(value)
