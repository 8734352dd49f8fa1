"""The tables of docs/kernels.md, from the rows of `python -m benchmarks.kernels --csv` and of `benchmarks/replayed.py`.

Times are medians in milliseconds, to three digits. Ratios compare with cuDNN, which is the fastest dense backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from seqarch.tables import read_csv

SMALL, LARGE = ("102400", "12", "64"), ("102400", "16", "128")
"""T, H and D of the tables with long sequences."""
DENSE = "dense cuDNN"
EARLIER = "19de233"
"""The commit of the call that timed the published kernels around the recurrences."""
Table = list[list[str]]


@cache
def read(card: str = "h200") -> list[dict[str, str]]:
    return read_csv(Path(__file__).parents[1] / f"kernels_{card}.csv")


def digits(number: float) -> str:
    """Three significant digits, never in scientific notation."""
    return f"{number:#.3g}".rstrip(".") if number < 1000 else f"{number:,.0f}"


def times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


@dataclass(frozen=True)
class Rows:
    """The rows of one step of a CSV; those with one name and shape must be unique."""

    rows: list[dict[str, str]]
    step: str

    def of(self, name: str, shape: tuple[str, ...], column: str = "p50") -> float:
        """The number of the row `name` whose T, H and D, or whose last of B, T, H and D, are `shape`."""
        found = [
            row[column]
            for row in self.rows
            if row["step"] == self.step
            and row["name"].removeprefix("decode ") == name
            and tuple(row[key] for key in "BTHD")[-len(shape) :] == shape
        ]
        if len(set(found)) != 1:
            raise ValueError(f"{self.step}: {len(found)} rows of {name!r} at {shape}, one is needed")
        return float(found[0])

    def ratios(self, slow: str, fast: str, shape: tuple[str, ...]) -> list[float]:
        """How many times as fast the second is, forward and with the backward pass."""
        return [self.of(f"{slow} {way}", shape) / self.of(f"{fast} {way}", shape) for way in ("fwd", "fwd+bwd")]

    def both(self, name: str, shape: tuple[str, ...]) -> str:
        return f"{digits(self.of(f'{name} fwd', shape))} / {digits(self.of(f'{name} fwd+bwd', shape))}"


def selection() -> Table:
    """The parts of Top-1 chunk attention at 102,400 tokens, forward and backward."""
    rows, skew, moba = Rows(read(), "time"), Rows(read(), "skew"), Rows(read("h100"), "moba")
    parts = {
        "exact selection": (rows, "select exact"),
        "approx selection": (rows, "select approx"),
        "attention to a given selection": (rows, "attend fwd+bwd"),
        "the same, 90 % of queries on one chunk": (skew, "attend fwd+bwd, 90 % on chunk 0"),
        "MoBA (fla), 2 chunks per query, on an H100": (moba, "MoBA (fla), remote chunks: 1 fwd+bwd"),
        "approx in whole, on that H100": (moba, "approx, remote chunks: 1 fwd+bwd"),
    }
    cells = [[label, *(digits(of.of(name, shape)) for shape in (SMALL, LARGE))] for label, (of, name) in parts.items()]
    return [["forward and backward, ms", "12 heads of 64", "16 heads of 128"], *cells]


def several() -> Table:
    """Several remote chunks per query next to FlashMoBA at 102,400 tokens; brackets are against dense attention."""
    rows = Rows(read(), "moba")
    table = [["forward and backward, ms", "FlashMoBA", "approx", "exact"]]
    for shape in (SMALL, LARGE):
        dense = rows.of(f"{DENSE} fwd+bwd", shape)
        for k in (1, 8):
            found = [rows.of(f"{n}, remote chunks: {k} fwd+bwd", shape) for n in ("FlashMoBA", "approx", "exact")]
            cells = (f"{digits(ms)} ({times(dense / ms)})" for ms in found)
            table.append([f"{shape[1]} heads of {shape[2]}, K = {k}", *cells])
    return table


def scales() -> Table:
    """Exact selection of random vectors by the scale of the scores; in brackets against dense attention."""
    rows, columns = Rows(read(), "trained"), ("D ** -0.5", "sqrt(D)")
    table = [["forward and backward, ms", *(f"scale `{column}`" for column in columns)]]
    for shape, named in ((SMALL, ("0.125", "8")), (LARGE, ("0.0884", "11.3"))):
        dense = rows.of(f"{DENSE} fwd+bwd", shape)
        found = [rows.of(f"random vectors, scale {name}: exact fwd+bwd", shape) for name in named]
        table.append([f"{shape[1]} heads of {shape[2]}", *(f"{digits(ms)} ({times(dense / ms)})" for ms in found)])
    return table


def sharp() -> Table:
    """Exact selection at scale sqrt(D) with keys by addresses and by tensor descriptors, in one run."""
    rows, table = Rows(read(), "sharp"), [["ms, scale `sqrt(D)`", "by addresses", "by descriptors"]]
    for label, name, shape in (
        ("forward and backward, 12 heads of 64", "exact fwd+bwd", ("1", *SMALL)),
        ("forward and backward, 16 heads of 128", "exact fwd+bwd", ("1", *LARGE)),
        ("selection in a pass over 16 prompts", "3936 last queries, exact select", ("16", "47232", "12", "64")),
    ):
        times = (rows.of(f"{name}, keys by {way}", shape) for way in ("addresses", "descriptors"))
        table.append([label, *map(digits, times)])
    return table


def pieces() -> Table:
    """Softmax attention of the last queries of a sequence, forward, as in passes over prompts."""
    rows = Rows(read(), "pieces")
    ways = ("FlashAttention-2", "FlashAttention-4")
    table = [["ms, forward", *ways]]
    for queries, shape in (
        ("3936", ("16", "7872", "12", "64")),
        ("3936", ("16", "51168", "12", "64")),
        ("976", ("64", "25376", "12", "64")),
        ("496", ("16", "5456", "12", "64")),
        ("4096", ("8", "28672", "16", "128")),
    ):
        label = f"{shape[0]} x {int(queries):,} queries, {int(shape[1]):,} keys, {shape[2]} heads of {shape[3]}"
        table.append([label, *(digits(rows.of(f"{queries} last queries: {way}", shape)) for way in ways)])
    return table


def loss() -> Table:
    """Linear cross-entropy of 65,536 tokens."""
    rows, shape = Rows(read(), "loss"), ("65536", "", "768")
    names = {
        "chunks of 8,192 tokens (the default)": "loss eager, chunks of 8192",
        "inside a compiled graph": "loss compiled",
        "all logits at once, compiled": "loss with all logits, compiled",
    }
    peaks = {name: f"{rows.of(name, shape, 'peak_mib'):,.0f}" for name in names.values()}
    return [["", "ms", "peak MiB"], *([label, digits(rows.of(n, shape)), peaks[n]] for label, n in names.items())]


def scan() -> Table:
    """The selective scan next to mamba-ssm's CUDA kernel, from one call."""
    rows = Rows(read(), "scan")
    table = [["ms, forward / forward and backward", "ours", "mamba-ssm, CUDA", "times as fast"]]
    for length, tokens in (("2048", "32 x 2,048"), ("102400", "1 x 102,400")):
        for width in ("1536", "4096"):
            shape = ("32" if length == "2048" else "1", length, width, "16")
            ratios = " / ".join(f"{ratio:.2f}" for ratio in rows.ratios("mamba-ssm CUDA", "scan", shape))
            both = [rows.both(name, shape) for name in ("scan", "mamba-ssm CUDA")]
            table.append([f"{tokens} tokens, {int(width):,} channels", *both, ratios])
    return table


def heads() -> Table:
    """The recurrence of Mamba-2 next to mamba-ssm's Triton kernels as they come."""
    rows = Rows(read(), "ssd")
    table = [["ms, forward / forward and backward", "ours", "mamba-ssm, Triton", "times as fast"]]
    for tokens, B, T in (("32 x 2,048", "32", "2048"), ("1 x 102,400", "1", "102400")):
        for count in ("24", "64"):
            shape = (B, T, count, "64")
            ratios = " / ".join(f"{ratio:.2f}" for ratio in rows.ratios("mamba-ssm Triton", "ssd by triton", shape))
            both = [rows.both(name, shape) for name in ("ssd by triton", "mamba-ssm Triton")]
            table.append([f"{tokens} tokens, {count} heads of 64", *both, ratios])
    return table


def in_order() -> str:
    """Milliseconds of mamba-ssm's kernels of Mamba-2 in their deterministic mode, in the first row of `heads`."""
    return Rows(read(), "ssd").both("ssd by mamba_ssm", ("32", "2048", "24", "64"))


def largest_error(op: str, backend: str, dtype: str) -> str:
    """The largest relative error against float64 of an op's outputs and gradients."""
    start = f"{op} by {backend}, {dtype}: "
    found = [float(row["p50"]) for row in read() if row["step"] == "errors" and row["name"].startswith(start)]
    return digits(max(found))


def around() -> Table:
    """The kernels around the recurrences, from CUDA graphs."""
    rows = Rows([row for row in read() if not row["commit"].startswith(EARLIER)], "around")
    table = [["forward and backward, ms", "ours", "PyTorch, compiled", "fla"]]
    for label, op, width, fla in (
        ("`short_convolution` and SiLU, 1,792 channels", "short convolution", ("1792", "4"), True),
        ("`qkv_convolution`, q and k of unit length, 2,304 channels", "qkv convolution", ("2304", "4"), False),
        ("`gated_rms_norm`, 1,536 channels", "gated norm", ("1536", "64"), False),
    ):
        peers = ("seqarch", "PyTorch, compiled", *(["fla"] if fla else []))
        cells = [digits(rows.of(f"{op}, {peer} fwd+bwd", width)) for peer in peers]
        table.append([label, *cells, *([] if fla else [""])])
    return table
