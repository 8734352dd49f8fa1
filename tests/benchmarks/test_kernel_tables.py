"""A table of kernel speed takes one row for a cell."""

import pytest

from benchmarks.kernel_tables import Rows


def row(name: str, p50: str, step: str = "time") -> dict[str, str]:
    return {"step": step, "name": name, "B": "1", "T": "8", "H": "2", "D": "4", "p50": p50}


def test_a_row_that_is_missing_or_ambiguous_is_an_error():
    rows = Rows([row("a", "1.5"), row("b", "1"), row("b", "2"), row("a", "9", "skew")], "time")
    assert rows.of("a", ("8", "2", "4")) == rows.of("a", ("1", "8", "2", "4")) == 1.5
    for name, shape in (("b", ("8", "2", "4")), ("c", ("8", "2", "4")), ("a", ("8", "2", "5"))):
        with pytest.raises(ValueError, match=f"{name!r}"):
            rows.of(name, shape)
