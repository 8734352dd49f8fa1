"""Writes the measured numbers and tables of README and docs from CSV files, run records and declarations.

    python -m benchmarks.pages            # write the pages anew
    python -m benchmarks.pages --check    # name the stale pages and exit with 1

On a page, `<!-- table: NAME ... -->` and `<!-- end -->` enclose a table, `<!-- value: NAME ... -->` and `<!-- end -->`
a number within a sentence. NAME is a function of a module in `benchmarks/tables`; the words after it are its arguments.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import (
    choice,
    cluster,
    context,
    kernels,
    left,
    long,
    mixers,
    options,
    predictions,
    recall,
    results,
    scale,
    sizes,
    speed,
)

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LEADING = re.compile(r"^ *<!-- value: .*", re.MULTILINE)
"""A comment that begins a line ends a paragraph or a list there, on the site and on GitHub."""
MADE = re.compile(r"(<!-- (?:table|value): (.+?) -->)(\n\n|).*?(\n\n|)(<!-- end -->)", re.DOTALL)
MODULES = (
    results,
    predictions,
    recall,
    speed,
    kernels,
    mixers,
    scale,
    sizes,
    choice,
    options,
    cluster,
    context,
    long,
    left,
)


def updated(text: str) -> str:
    """The text of a page with its tables and values made anew.

    Raises:
        ValueError: a value begins a line, or see `made`.
    """
    if begins := LEADING.search(text):
        raise ValueError(f"put a word in front of the value on this line: {begins[0].strip()}")
    return MADE.sub(lambda match: "".join((match[1], match[3], made(match[2]), match[4], match[5])), text)


def made(call: str) -> str:
    """What stands between the markers of a call such as `gap mamba2 1.02B`.

    Raises:
        ValueError: no module, or more than one, has a function of this name.
    """
    name, *arguments = shlex.split(call)
    functions = [getattr(module, name) for module in MODULES if hasattr(module, name)]
    if len({id(function) for function in functions}) != 1:
        raise ValueError(f"{len(functions)} functions in benchmarks/tables are called {name!r}, one is needed")
    content = functions[0](*arguments)
    return content if isinstance(content, str) else markdown(content)


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table as Markdown, its head first."""
    head, *rows = ("| " + " | ".join(line) + " |" for line in table)
    lines = [head, "|" + "---|" * len(table[0]), *rows]
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |")


def stale() -> dict[Path, str]:
    """The new text of each page that differs from it."""
    new = {page: updated(page.read_text(encoding="utf-8")) for page in PAGES}
    return {page: text for page, text in new.items() if text != page.read_text(encoding="utf-8")}


def main() -> None:
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    pages = stale()
    for page, text in pages.items():
        print(page.relative_to(ROOT), "is stale" if sys.argv[1:] else "written")
        if not sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
    sys.exit("run `python -m benchmarks.pages`" if pages and sys.argv[1:] else None)


if __name__ == "__main__":
    main()
