"""Tables of the pages on speed, made from rows of CSV files."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Row = dict[str, str]
Table = list[list[str]]


def table(columns: dict[str, Callable[[Row], str]], rows: Iterable[Row]) -> Table:
    """A row of cells for each row of a CSV."""
    return [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]


def digits(number: float) -> str:
    """Three significant digits, never in scientific notation."""
    return f"{number:#.3g}".rstrip(".") if number < 1000 else f"{number:,.0f}"


def times(ratio: float) -> str:
    return f"{ratio:.1f} x" if ratio < 100 else f"{ratio:.0f} x"


def markdown(table: Table) -> str:
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |").replace("|  |", "| |")
