"""Writes the tables of mixers in README.md and docs/mixers.md from the declarations of the classes.

A table lies between `<!-- table: NAME -->` and `<!-- end -->`. Run this after a change of a mixer:

    python scripts/mixer_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from seqarch.cli.mixers import cost_table, describe_mixers
from seqarch.mixers.registry import load_mixer

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/mixers.md")
TABLE = re.compile(r"(<!-- table: (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
PAPER = r"arXiv (\d{4}\.\d{5})"


def families() -> str:
    """The mixers of each family and their papers."""
    rows: dict[str, list[dict]] = {}
    for mixer in _ours():
        rows.setdefault(load_mixer(mixer["name"]).family, []).append(mixer)
    lines = ["| family | mixers | arXiv |", "| --- | --- | --- |"]
    for family, mixers in sorted(rows.items()):
        papers = sorted({paper for mixer in mixers for paper in re.findall(PAPER, mixer["source"])})
        links = (f"[{paper}](https://arxiv.org/abs/{paper})" for paper in papers)
        names = (f"`{mixer['name']}`" for mixer in mixers)
        lines.append(f"| {family} | {', '.join(names)} | {', '.join(links)} |")
    return "\n".join(lines)


def overview() -> str:
    """What each mixer does, family by family."""
    rows = sorted((load_mixer(mixer["name"]).family, mixer["name"], mixer["summary"]) for mixer in _ours())
    lines = [f"| `{name}` | {family} | {summary} |" for family, name, summary in rows]
    return "\n".join(("| mixer | family | what it does |", "| --- | --- | --- |", *lines))


def costs() -> str:
    """The table of `seqarch mixers --costs` without plug-ins, with links."""
    names = {mixer["name"] for mixer in _ours()}
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in cost_table().splitlines()]
    rows = [[f"`{row[0]}`", *map(_linked, row[1:])] for row in rows if row[0] in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def updated(page: str) -> str:
    """The text of a page with its tables made anew."""
    tables = {"families": families, "overview": overview, "costs": costs}
    return TABLE.sub(lambda match: match[1] + tables[match[2]]() + match[3], (ROOT / page).read_text(encoding="utf-8"))


def _ours() -> list[dict]:
    return [mixer for mixer in describe_mixers() if mixer["package"] == "seqarch"]


def _linked(text: str) -> str:
    return re.sub(PAPER, r"[arXiv \1](https://arxiv.org/abs/\1)", text)


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(updated(page), encoding="utf-8")
