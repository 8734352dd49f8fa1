"""A table of kernel speed takes one row for a cell."""

from pathlib import Path

import pytest

from benchmarks.kernel_tables import EARLIER, Rows, around
from seqarch.tables import read_csv

ROOT = Path(__file__).parents[2]
ROWS = read_csv(ROOT / "benchmarks/kernels_h200.csv")
PAGE = " ".join((ROOT / "docs/kernels.md").read_text(encoding="utf-8").split())


def row(name: str, p50: str, step: str = "time") -> dict[str, str]:
    return {"step": step, "name": name, "B": "1", "T": "8", "H": "2", "D": "4", "p50": p50}


def test_a_row_that_is_missing_or_ambiguous_is_an_error():
    rows = Rows([row("a", "1.5"), row("b", "1"), row("b", "2"), row("a", "9", "skew")], "time")
    assert rows.of("a", ("8", "2", "4")) == rows.of("a", ("1", "8", "2", "4")) == 1.5
    for name, shape in (("b", ("8", "2", "4")), ("c", ("8", "2", "4")), ("a", ("8", "2", "5"))):
        with pytest.raises(ValueError, match=f"{name!r}"):
            rows.of(name, shape)


def test_the_limits_of_the_three_calls():
    limits = [row for row in ROWS if row["step"] == "limits"]
    assert [row["commit"][:7] for row in limits] == ["53e738b"] * 4 + ["71f7a17"] * 2 + ["9e8b08b"] * 2
    products, copies = (
        [float(row["p50"]) for row in limits if row["unit"] == unit and not row["commit"].startswith("71f7a17")]
        for unit in ("TFLOP/s", "TB/s")
    )
    product = "{:.0f}, {:.0f} and {:.0f} TFLOP/s".format(*products)
    copy = "{:.2f}, {:.2f} and {:.2f} TB/s".format(*copies)
    assert f"a matrix product of 8192^3 reached {product}, and a device copy {copy}" in PAGE


def test_what_surrounds_the_recurrences():
    """Two calls give the columns, and the sentences below the table follow from the later one."""
    rows = [row for row in ROWS if row["step"] == "around"]
    now = Rows([row for row in rows if not row["commit"].startswith(EARLIER)], "around")
    assert {row["commit"][:7] for row in now.rows} == {"9e8b08b"}
    short, qkv, norm = ("1792", "4"), ("2304", "4"), ("1536", "64")
    compiled = [
        now.ratios(f"{name}, PyTorch, compiled", f"{name}, seqarch", shape)[1]
        for name, shape in (("short convolution", short), ("qkv convolution", qkv))
    ]
    fla = now.ratios("short convolution, fla", "short convolution, seqarch", short)[1]
    said = "PyTorch's compiler takes {:.1f} and {:.1f} times as long as our two convolutions".format(*compiled)
    assert f"{said}, and fla takes {fla:.1f} times as long" in PAGE
    ours, theirs = (now.of(f"gated norm, {name} fwd+bwd", norm) for name in ("seqarch", "PyTorch, compiled"))
    assert f"it takes {ours:.2f} ms, and PyTorch compiled takes {theirs:.2f} ms" in PAGE
    (_, short_cells, qkv_cells, norm_cells) = around(ROWS)
    assert qkv_cells[3:] == ["", "", ""]
    assert short_cells[1] != short_cells[4]
    assert norm_cells[3] == ""
