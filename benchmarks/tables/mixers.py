"""The tables of mixers, from the declarations of their classes."""

from __future__ import annotations

from seqarch.cli.mixers import cost_table, describe_mixers

Table = list[list[str]]


def costs() -> Table:
    """Parameters, operations and states (short / long) from `seqarch mixers --costs`."""
    names = {mixer["name"] for mixer in _ours()}
    _, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in cost_table().splitlines()]
    table = [["mixer", "parameters", "MFLOP", "state, KiB"]]
    for name, parameters, *numbers, _, _, _, _, _, _ in rows:
        if name in names:
            short, long = numbers[::2], numbers[1::2]
            both = [one if one == two else f"{one} / {two}" for one, two in zip(short, long, strict=True)]
            table.append([f"`{name}`", parameters, *both])
    return table


def _ours() -> list[dict]:
    return [mixer for mixer in describe_mixers() if mixer["package"] == "seqarch"]
