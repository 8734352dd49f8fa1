"""`seqarch mixers`: what is installed, with options and abilities."""

from __future__ import annotations

import inspect
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from seqarch.mixers.base import CAPABILITIES
from seqarch.mixers.registry import import_mixers, mixer_entries

GIVEN_BY_THE_MODEL = ("self", "d_model", "layer_idx", "n_layers")


def describe_mixers() -> list[dict[str, Any]]:
    """One entry a mixer: name, class, package, version, options with defaults, capabilities, source."""
    classes = import_mixers()
    return [
        {
            "name": entry.name,
            "class": entry.target,
            "package": entry.package,
            "version": entry.version,
            "options": mixer_options(classes[entry.name]),
            "capabilities": [name for name in CAPABILITIES if name in classes[entry.name].capabilities],
            "source": classes[entry.name].source,
            "summary": (inspect.getdoc(classes[entry.name]) or "").split("\n\n")[0].replace("\n", " "),
        }
        for entry in mixer_entries()
        if entry.name in classes
    ]


def mixer_options(mixer: type) -> dict[str, str]:
    """Each option of a mixer with its default as text; "required" where there is none."""
    parameters = inspect.signature(mixer).parameters
    return {
        name: "required" if parameter.default is parameter.empty else repr(parameter.default)
        for name, parameter in parameters.items()
        if name not in GIVEN_BY_THE_MODEL and parameter.kind is not parameter.VAR_KEYWORD
    }


def mixer_json() -> str:
    """The list as JSON."""
    return json.dumps(describe_mixers(), indent=2)


def mixer_table() -> str:
    """The list as a table for the terminal."""
    table = Table(show_lines=True)
    for column in ("mixer", "package", "options", "can", "source"):
        table.add_column(column, overflow="fold")
    for mixer in describe_mixers():
        table.add_row(
            f"[bold]{mixer['name']}[/bold]\n{mixer['class']}",
            f"{mixer['package']} {mixer['version']}",
            "\n".join(f"{name} = {value}" for name, value in mixer["options"].items()),
            ", ".join(mixer["capabilities"]),
            mixer["source"],
        )
    console = Console()
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()
