"""The tables of mixers, from the declarations of their classes."""

from __future__ import annotations

import re

from seqarch.cli.mixers import cost_table, describe_mixers
from seqarch.mixers.registry import load_mixer

Table = list[list[str]]
PAPER = r"arXiv (\d{4}\.\d{5})"


def families() -> Table:
    """The mixers of each family and their papers."""
    rows: dict[str, list[dict]] = {}
    for mixer in _ours():
        rows.setdefault(load_mixer(mixer["name"]).family, []).append(mixer)
    table = [["family", "mixers", "arXiv"]]
    for family, mixers in sorted(rows.items()):
        papers = sorted({paper for mixer in mixers for paper in re.findall(PAPER, mixer["source"])})
        links = (f"[{paper}](https://arxiv.org/abs/{paper})" for paper in papers)
        names = (f"`{mixer['name']}`" for mixer in mixers)
        table.append([family, ", ".join(names), ", ".join(links)])
    return table


def overview() -> Table:
    """What each mixer does, family by family."""
    rows = sorted((load_mixer(mixer["name"]).family, mixer["name"], mixer["summary"]) for mixer in _ours())
    return [["mixer", "family", "what it does"], *([f"`{name}`", family, summary] for family, name, summary in rows)]


def costs() -> Table:
    """The table of `seqarch mixers --costs` without plug-ins, with links."""
    names = {mixer["name"] for mixer in _ours()}
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in cost_table().splitlines()]
    return [head, *([f"`{row[0]}`", *map(_linked, row[1:])] for row in rows if row[0] in names)]


def _ours() -> list[dict]:
    return [mixer for mixer in describe_mixers() if mixer["package"] == "seqarch"]


def _linked(text: str) -> str:
    return re.sub(PAPER, r"[arXiv \1](https://arxiv.org/abs/\1)", text)
