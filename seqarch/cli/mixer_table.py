"""`seqarch mixers`: what is installed, with options and abilities."""

from __future__ import annotations

import inspect
import json
import shutil
import textwrap
from typing import Any

from seqarch.mixers.base import CAPABILITIES
from seqarch.mixers.registry import import_mixers, mixer_entries

NO_BREAK = "\N{NO-BREAK SPACE}"
GIVEN_BY_THE_MODEL = ("d_model", "layer_idx", "n_layers")
LABELS = ("class", "package", "options", "can", "kernels", "source")


def describe_mixers() -> list[dict[str, Any]]:
    """One entry a mixer: name, class, package, version, options with defaults, capabilities, kernels, source, summary.

    An option is `{"default": ..., "required": ...}`. Mixers that cannot be imported are left out with a warning.
    """
    classes = import_mixers()
    return [
        {
            "name": entry.name,
            "class": entry.target,
            "package": entry.package,
            "version": entry.version,
            "options": mixer_options(classes[entry.name]),
            "capabilities": [name for name in CAPABILITIES if name in classes[entry.name].capabilities],
            "kernels": dict(classes[entry.name].kernels),
            "source": classes[entry.name].source,
            "summary": (inspect.getdoc(classes[entry.name]) or "").split("\n\n")[0].replace("\n", " "),
        }
        for entry in mixer_entries()
        if entry.name in classes
    ]


def mixer_options(mixer: type) -> dict[str, dict[str, Any]]:
    """Each option of a mixer with its default, `None` where it is required."""
    return {
        name: {
            "default": None if parameter.default is parameter.empty else parameter.default,
            "required": parameter.default is parameter.empty,
        }
        for name, parameter in inspect.signature(mixer).parameters.items()
        if name not in GIVEN_BY_THE_MODEL and parameter.kind is not parameter.VAR_KEYWORD
    }


def mixer_json() -> str:
    """The list as JSON; a default that JSON cannot hold is given as text."""
    return json.dumps(describe_mixers(), indent=2, default=str)


def mixer_table(width: int | None = None) -> str:
    """The list for the terminal: a paragraph a mixer, no line longer than `width` (by default the terminal's)."""
    width = width or shutil.get_terminal_size((80, 24)).columns
    return "\n\n".join(_paragraph(mixer, width) for mixer in describe_mixers()) or "no mixer is installed"


def _paragraph(mixer: dict[str, Any], width: int) -> str:
    values = (
        mixer["class"],
        f"{mixer['package']} {mixer['version']}",
        ", ".join(_option(name, **option) for name, option in mixer["options"].items()) or "none",
        ", ".join(mixer["capabilities"]) or "run whole sequences only",
        "; ".join(f"{device.upper()}: {kernels}" for device, kernels in mixer["kernels"].items()) or "not given",
        mixer["source"] or "not given",
    )
    lines = textwrap.wrap(f"{mixer['name']}: {mixer['summary']}", width, subsequent_indent="  ")
    for label, value in zip(LABELS, values, strict=True):
        indent = f"  {label:8} "
        lines += textwrap.wrap(
            value,
            width,
            initial_indent=indent,
            subsequent_indent=" " * len(indent),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines).replace(NO_BREAK, " ")


def _option(name: str, default: Any, required: bool) -> str:
    text = f"{name} (required)" if required else f"{name}={default}"
    return text.replace(" ", NO_BREAK)
