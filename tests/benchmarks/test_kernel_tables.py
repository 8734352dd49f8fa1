"""A table of kernel speed takes one row for a cell."""

from pathlib import Path

import pytest

from benchmarks.kernel_tables import EARLIER, Rows, around
from seqarch.tables import read_csv

ROOT = Path(__file__).parents[2]
ROWS = read_csv(ROOT / "benchmarks/kernels_h200.csv")
PAGE = " ".join((ROOT / "docs/kernels.md").read_text(encoding="utf-8").split())
LOG = " ".join((ROOT / "docs/kernels_log.md").read_text(encoding="utf-8").split())
H100 = read_csv(ROOT / "benchmarks/kernels_h100.csv")


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


def test_the_log_has_the_recorded_vectors_of_the_csv():
    heads, layers = ("102400", "4", "64"), range(4)
    recorded = Rows(H100, "trained")

    def of(layer: int, name: str) -> float:
        return recorded.of(f"recorded layer {layer}, scale 0.125: {name}", heads)

    for layer in layers:
        cells = [f"{of(layer, name):.2f}, {of(layer, f'{name}_block'):.2f}" for name in ("mean", "max", "fp8")]
        assert f"| {layer} | {' | '.join(cells)} |" in LOG
    block = [of(layer, f"{name}_block") for layer in layers for name in ("max", "fp8")]
    query = [of(layer, "fp8") for layer in layers]
    left = f"leave {min(block):.2f} to {max(block):.2f} of the chunks. Per query, FP8 masses leave {min(query):.2f} to"
    assert f"{left} {max(query):.2f}." in LOG
    assert LOG.count(f"a factor of {1 / min(query):.1f} in products") == 2
    dense = float(next(row["p50"] for row in H100 if row["name"] == "dense cuDNN fwd+bwd" and row["H"] == "4"))
    whole, select = ([of(layer, name) for layer in layers] for name in ("exact fwd+bwd", "select exact"))
    times = [dense / each for each in whole]
    assert f"exact attention is {min(times):.1f} to {max(times):.1f} times as fast as dense attention, not 9." in LOG
    now = sum(select) / 4
    attend = sum(whole) / 4 - now
    assert f"means {dense / 9:.1f} ms here, and attention takes {attend:.1f} ms of it" in LOG
    aim = dense / 9 - attend
    assert f"Selection would have to fall from {now:.1f} to {aim:.1f} ms, by a factor of {now / aim:.1f}." in LOG


def test_the_log_has_the_tables_of_the_h100():
    moba = Rows([row for row in H100 if row["H"] == "16"], "moba")
    heads = ("102400", "16", "128")
    names = ("MoBA (fla), remote chunks: 1 fwd+bwd", "approx, remote chunks: 1 fwd+bwd")
    theirs, ours = (moba.of(name, heads) for name in names)
    assert f"and {theirs / ours:.0f} times as fast as MoBA, not 65." in LOG
    short = Rows(H100, "replayed")
    small, large = ("32", "2048", "12", "64"), ("16", "2048", "16", "128")
    exact, dense = (short.of(f"{name}, replayed: fwd+bwd", large) for name in ("exact", "dense cuDNN"))
    assert f"exact attention takes {exact:.2f} ms from a CUDA graph, and dense attention {dense:.2f} ms" in LOG
    more = [
        short.of("exact, called: fwd+bwd", each) - short.of("exact, replayed: fwd+bwd", each) for each in (large, small)
    ]
    assert "exact attention takes {:.1f} ms more, and {:.1f} ms more at D = 64.".format(*more) in LOG
