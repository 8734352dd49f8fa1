"""`seqarch mixers NAME`, `--json` and `--costs`: options, abilities and costs of mixers, which are imported for it."""

import inspect
import shutil
import textwrap
import warnings
from argparse import SUPPRESS
from collections.abc import Collection
from typing import Any

import torch

from seqarch.errors import PluginWarning, UserError
from seqarch.experiment.checker import as_named, options_of, parser_of_class
from seqarch.experiment.recipes import bundled_recipes, merged_recipe, mixer_classes
from seqarch.mixers.base import CAPABILITIES, GIVEN_BY_THE_MODEL, Mixer
from seqarch.mixers.registry import import_mixers, load_mixer, mixer_entries
from seqarch.tables import markdown

N_LAYERS = 12
HEAD_DIM = 64
LENGTHS = {"2k": 2048, "100k": 102400}
DEVICES = ("CPU", "CUDA")
COSTS = [f"{cost} {length}" for cost in ("MFLOP", "state KiB") for length in LENGTHS]
COLUMNS = ("mixer", "parameters", *COSTS, *DEVICES, *CAPABILITIES, "source")

LARGEST = 2**20
"""The largest width: PyTorch cannot count the bytes of much larger matrices."""


def describe_mixers(names: Collection[str] = ()) -> list[dict[str, Any]]:
    """An entry per mixer: name, class, package, version, options, capabilities, kernels, source, summary.

    An option is `{"default": ..., "required": ..., "meaning": ...}`. Without `names` these are all mixers, and those
    that cannot be imported are left out with a warning.

    Raises:
        UserError: a named mixer is unknown or cannot be imported.
    """
    classes = _classes(names)
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


def _classes(names: Collection[str]) -> dict[str, type[Mixer]]:
    return {name: load_mixer(name) for name in names} or import_mixers()


def mixer_options(mixer: type) -> dict[str, dict[str, Any]]:
    """Each option of a mixer with its default, `None` where it is required, and its meaning from the docstrings."""
    parser = parser_of_class(mixer, len(GIVEN_BY_THE_MODEL))
    meanings = {action.dest: " ".join((action.help or "").split()) for action in parser._actions}
    return {
        name: {"default": as_named(option.default), "required": option.required, "meaning": meanings[name]}
        for name, option in options_of(parser).items()
        if option.default != SUPPRESS  # the section of a dataclass, whose fields are listed
    }


def mixer_pages(names: Collection[str]) -> str:
    """For the terminal: a paragraph and a table of options for each mixer, no line longer than the terminal is wide.

    Raises:
        UserError: a mixer is unknown or cannot be imported.
    """
    width = shutil.get_terminal_size((80, 24)).columns
    recipes = {name: mixer_classes(merged_recipe(path)) for name, path in bundled_recipes().items()}
    pages = []
    for mixer in describe_mixers(names):
        used = [name for name, classes in recipes.items() if mixer["name"] in classes]
        pages.append(_page(mixer, used, width))
    return "\n\n".join(pages)


def _page(mixer: dict[str, Any], recipes: list[str], width: int) -> str:
    facts = {
        "class": mixer["class"],
        "package": f"{mixer['package']} {mixer['version']}",
        "can": ", ".join(mixer["capabilities"]) or "run whole sequences only",
        "kernels": "; ".join(f"{on.upper()}: {by}" for on, by in mixer["kernels"].items()) or "not given",
        "cost": _cost(mixer["name"]),
        "source": mixer["source"] or "not given",
        "recipes": ", ".join(recipes) or "none of seqarch's",
    }
    lines = textwrap.wrap(f"{mixer['name']}: {mixer['summary']}", width, subsequent_indent="  ")
    for label, value in facts.items():
        lines += _wrapped(f"  {label:8} ", value, width)
    if mixer["options"]:
        lines += ["", "  options (--mixer.OPTION VALUE in an exam, init_args in a recipe)"]
    for name, option in mixer["options"].items():
        lines += _wrapped("  ", f"{name} (required)" if option["required"] else f"{name} = {option['default']}", width)
        lines += _wrapped("      ", option["meaning"], width)
    return "\n".join(lines)


def _wrapped(label: str, text: str, width: int) -> list[str]:
    indents: dict[str, Any] = {"initial_indent": label, "subsequent_indent": " " * len(label)}
    return textwrap.wrap(text, width, **indents, break_long_words=False, break_on_hyphens=False)


def _cost(name: str) -> str:
    (row,) = mixer_costs(names=[name])
    if row["parameters"] is None:
        return "not known"  # a warning says why
    parts = [f"{_text(row, 'parameters')} parameters in a layer of width 768"]
    for length in LENGTHS:
        state = "" if row[f"state KiB {length}"] is None else f", state of {_text(row, f'state KiB {length}')} KiB"
        parts.append(f"at {length} tokens {_text(row, f'MFLOP {length}')} MFLOP per token{state}")
    return "; ".join(parts)


def mixer_costs(d_model: int = 768, names: Collection[str] = ()) -> list[dict[str, Any]]:
    """One row per mixer, or named mixer, with the keys `COLUMNS` and "counted": means over the 12 layers of a model.

    Operations are those of one token forward, states are bf16. Mixers are built on no device, with the options at which
    they were published at this width; otherwise with their defaults, and with `d_model / 64` heads where heads are
    required. `CPU` and `CUDA` say what computes it there. "counted" says that the operations were counted, because
    the mixer has no formula. Missing facts are `None`, and so are, with a warning, the numbers of a mixer that raises
    an error, for instance because it needs further options.
    """
    if not HEAD_DIM <= d_model <= LARGEST or d_model % HEAD_DIM:
        raise UserError(f"d_model must be a multiple of {HEAD_DIM} up to {LARGEST:,}, not {d_model}")
    return [_costs(name, mixer, d_model) for name, mixer in sorted(_classes(names).items())]


def _costs(name: str, mixer: type[Mixer], d_model: int) -> dict[str, Any]:
    required = {option for option, facts in mixer_options(mixer).items() if facts["required"]}
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"mixer": name, "counted": False}
    row.update({ability: ability in mixer.capabilities for ability in CAPABILITIES})
    row.update({device: mixer.kernels.get(device.lower()) for device in DEVICES}, source=mixer.source or None)
    options = dict(mixer.published.get(d_model) or ({"n_heads": d_model // HEAD_DIM} if "n_heads" in required else {}))
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


def cost_table(d_model: int = 768, names: Collection[str] = ()) -> str:
    """The rows as a Markdown table, which is readable in a terminal as well."""
    cells = [[_text(row, column) for column in COLUMNS] for row in mixer_costs(d_model, names)]
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
