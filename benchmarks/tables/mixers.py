"""The tables of mixers, from the declarations of their classes."""

from __future__ import annotations

from seqarch.cli.mixers import cost_table, describe_mixers

Table = list[list[str]]


def costs() -> Table:
    """Parameters, operations and states from `seqarch mixers --costs`, and what runs on CUDA."""
    names = {mixer["name"] for mixer in _ours()}
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in cost_table().splitlines()]
    kept = [head.index(name) for name in head if name not in ("CPU", "decode", "packed", "entropy", "source")]
    own = [row for row in rows if row[0] in names]
    return [[row[k] for k in kept] for row in (head, *([f"`{name}`", *cells] for name, *cells in own))]


def _ours() -> list[dict]:
    return [mixer for mixer in describe_mixers() if mixer["package"] == "seqarch"]
