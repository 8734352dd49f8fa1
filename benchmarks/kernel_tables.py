"""The tables of docs/kernels.md from the rows of `python -m benchmarks.kernels --csv` and of `benchmarks/replayed.py`.

    python -m benchmarks.kernel_tables benchmarks/kernels_h200.csv benchmarks/kernels_h100.csv

Times are medians in milliseconds, to three digits. Ratios compare with cuDNN, which is the faster dense backend.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page_tables import Table, digits, markdown, times
from benchmarks.script import run
from seqarch.tables import read_csv

SMALL, LARGE = ("102400", "12", "64"), ("102400", "16", "128")
"""T, H and D of the tables with long sequences."""
AT_BOTH = ["forward + backward, ms", "H = 12, D = 64", "H = 16, D = 128", "aim"]
DENSE = "dense cuDNN"
EARLIER = "19de233"
"""The commit of the call that timed the published kernels around the recurrences."""


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


def selection(all_rows: list[dict[str, str]]) -> Table:
    rows, skew = Rows(all_rows, "time"), Rows(all_rows, "skew")
    cells: Table = [AT_BOTH]

    def add(label: str, aim: str, cell) -> None:
        cells.append([label, cell(SMALL), cell(LARGE), aim])

    def against_dense(name: str, shape: tuple[str, ...]) -> str:
        ratio = rows.of(f"{DENSE} fwd+bwd", shape) / rows.of(name, shape)
        return f"{digits(rows.of(name, shape))} ({times(ratio)})"

    def skewed(shape: tuple[str, ...]) -> str:
        one = skew.of("attend fwd+bwd, 90 % on chunk 0", shape)
        return f"{digits(one)} ({one / skew.of('attend fwd+bwd, spread', shape):.2f} x)"

    for backend in ("cuDNN", "FlashAttention-2"):
        add(f"dense, {backend}", "", lambda shape, b=backend: digits(rows.of(f"dense {b} fwd+bwd", shape)))
    add("exact: select + attend", "10 x", lambda shape: against_dense("exact fwd+bwd", shape))
    add("approx: select + attend", "40 x, 55 x: missed", lambda shape: against_dense("approx fwd+bwd", shape))
    for kind, aim in (("exact", "14, 34"), ("approx", "")):
        add(f"{kind} selection only", aim, lambda shape, k=kind: digits(rows.of(f"select {k}", shape)))
    add("attention to a given selection, forward / and backward", "", lambda shape: rows.both("attend", shape))
    add("and backward, with 90 % of queries on chunk 0", "1.3 x", skewed)
    return cells


def moba(all_rows: list[dict[str, str]]) -> Table:
    rows = Rows(all_rows, "moba")
    ours, theirs = (f"{name}, remote chunks: 1" for name in ("approx", "MoBA (fla)"))
    ratios = [rows.ratios(theirs, ours, shape)[1] for shape in (SMALL, LARGE)]
    return [
        AT_BOTH,
        *(
            [label, *(digits(rows.of(f"{name} fwd+bwd", shape)) for shape in (SMALL, LARGE)), ""]
            for label, name in {"approx": ours, "MoBA's method, fla's version of its code": theirs}.items()
        ),
        ["approx, times as fast", *map(times, ratios), "45 x, 65 x: missed"],
    ]


def short(all_rows: list[dict[str, str]]) -> Table:
    rows = Rows(all_rows, "replayed")
    shapes = {"B = 32, H = 12, D = 64": ("2048", "12", "64"), "B = 16, H = 16, D = 128": ("2048", "16", "128")}
    cells = [["T = 2,048, forward + backward, ms", *(f"{each}: called, replayed" for each in shapes)]]
    for label, name in {
        "dense, cuDNN": DENSE,
        "exact": "exact",
        "approx": "approx",
        "exact, scale `sqrt(D)`": "exact, scale sqrt(D)",
    }.items():
        pairs = [
            [digits(rows.of(f"{name}, {how}: fwd+bwd", s)) for how in ("called", "replayed")] for s in shapes.values()
        ]
        cells.append([label, *map(", ".join, pairs)])
    return cells


def growth(all_rows: list[dict[str, str]]) -> Table:
    rows, base = Rows(all_rows, "growth"), Rows(all_rows, "time")
    cells = [["T = 1,048,576, H = 12, D = 64, ms", "time", "against 102,400 tokens", "aim"]]
    for label, name, aim in (
        ("approx: select + attend", "approx", "14 x: missed"),
        ("of this, attend", "attend", ""),
        ("exact: select + attend", "exact", ""),
    ):
        long = rows.of(f"{name} fwd+bwd", ("1048576", "12", "64"))
        cells.append([label, digits(long), times(long / base.of(f"{name} fwd+bwd", SMALL)), aim])
    return cells


def decoding(all_rows: list[dict[str, str]]) -> Table:
    rows = Rows(all_rows, "decode")
    shapes = [("64", "50000", "12", "64"), ("64", "50000", "16", "128"), ("1", "102400", "12", "64")]
    shapes.append(("1", "102400", "16", "128"))
    named = [f"B = {b}, {int(t):,} keys, H = {h}, D = {d}" for b, t, h, d in shapes]
    cells = [["ms", *named, "aim at B = 64"]]

    def dense(shape: tuple[str, ...], graph: str) -> float:
        return min(rows.of(f"{DENSE}{layout}{graph}", shape) for layout in ("", ", by head"))

    def against(shape: tuple[str, ...], name: str, graph: str) -> str:
        one = rows.of(f"{name}{graph}", shape)
        return f"{digits(one)} ({times(dense(shape, graph) / one)})"

    graph = ", CUDA graph"
    cells.append([DENSE.replace(" ", ", "), *(digits(dense(shape, graph)) for shape in shapes), ""])
    for label, name, aim in (
        ("exact", "exact", "1.9 x"),
        ("exact, K = 2", "exact, remote chunks: 2", ""),
        ("exact, K = 8", "exact, remote chunks: 8", ""),
        ("approx", "approx", "15 x"),
        ("approx, mean keys in bf16", "approx, means in bf16", ""),
        ("approx, K = 2", "approx, remote chunks: 2", ""),
        ("approx, K = 8", "approx, remote chunks: 8", ""),
    ):
        cells.append([label, *(against(shape, name, graph) for shape in shapes), aim])
    cells.append(["approx, called from Python", *(against(shape, "approx", "") for shape in shapes), ""])
    return cells


def several(all_rows: list[dict[str, str]]) -> Table:
    rows = Rows(all_rows, "moba")
    head = ["ms, forward / forward and backward", "FlashMoBA", "approx", "approx, times faster than FlashMoBA", "exact"]
    cells = [[*head, "MiB, FlashMoBA / ours"]]

    def both(name: str, shape: tuple[str, ...]) -> str:
        ratio = rows.of(f"{DENSE} fwd+bwd", shape) / rows.of(f"{name} fwd+bwd", shape)
        return f"{rows.both(name, shape)} ({times(ratio)})"

    for shape in (SMALL, LARGE):
        memory = f"{rows.of(f'{DENSE} fwd+bwd', shape, 'peak_mib'):,.0f}"
        cells.append([f"D = {shape[-1]}, dense, cuDNN", rows.both(DENSE, shape), "", "", "", memory])
        for k in (1, 2, 4, 8):
            ours, theirs = f"approx, remote chunks: {k}", f"FlashMoBA, remote chunks: {k}"
            ratios = map(times, rows.ratios(theirs, ours, shape))
            peaks = [f"{rows.of(f'{name} fwd+bwd', shape, 'peak_mib'):,.0f}" for name in (theirs, ours)]
            exact = both(f"exact, remote chunks: {k}", shape)
            cells.append(
                [f"K = {k}", both(theirs, shape), both(ours, shape), " / ".join(ratios), exact, " / ".join(peaks)]
            )
    return cells


def scales(all_rows: list[dict[str, str]], shape: tuple[str, ...], names: tuple[str, ...]) -> Table:
    rows = Rows(all_rows, "trained")
    columns = dict(zip(("D ** -0.5", "1", "sqrt(D)", "16"), names, strict=True))
    vectors = {column: f"random vectors, scale {name}: " for column, name in columns.items()}
    whole = {column: rows.of(f"{name}exact fwd+bwd", shape) for column, name in vectors.items()}
    dense = rows.of(f"{DENSE} fwd+bwd", shape)
    return [
        [f"H = {shape[1]}, D = {shape[2]}, by scale", *columns],
        ["exact selection only", *(f"{digits(rows.of(f'{name}select exact', shape))} ms" for name in vectors.values())],
        ["whole attention, forward and backward", *(f"{digits(ms)} ms ({times(dense / ms)})" for ms in whole.values())],
        [
            "earlier chunks that the bounds leave to a query",
            *(f"{rows.of(f'{name}mean', shape):.2g}" for name in vectors.values()),
        ],
        [
            "earlier chunks that they leave to 64 queries together",
            *(f"{rows.of(f'{name}mean_block', shape):.2g}" for name in vectors.values()),
        ],
    ]


def recorded(all_rows: list[dict[str, str]], width: str, scale: str) -> Table:
    rows, shape, layers = Rows(all_rows, "trained"), ("102400", "4", width), range(4)
    names = [f"recorded layer {layer}, scale {scale}: " for layer in layers]
    whole = [rows.of(f"{name}exact fwd+bwd", shape) for name in names]
    dense = rows.of(f"{DENSE} fwd+bwd", shape)
    return [
        [f"recorded vectors, H = 4, D = {width}, by layer", *map(str, layers)],
        ["exact selection only", *(f"{digits(rows.of(f'{name}select exact', shape))} ms" for name in names)],
        ["whole attention, forward and backward", *(f"{digits(ms)} ms ({times(dense / ms)})" for ms in whole)],
    ]


def element(all_rows: list[dict[str, str]]) -> Table:
    rows = Rows(all_rows, "element")
    cells = [["ms, forward / forward and backward", "Top-1 element", "cuDNN", "FlashAttention-2", "against cuDNN"]]
    for shape in (
        ("32", "2048", "12", "64"),
        ("16", "2048", "16", "128"),
        ("4", "16384", "12", "64"),
        ("2", "16384", "16", "128"),
    ):
        b, t, h, d = shape
        ratios = rows.ratios(DENSE, "element", shape)
        three = [rows.both(name, shape) for name in ("element", DENSE, "dense FlashAttention-2")]
        cells.append(
            [f"B = {b}, T = {int(t):,}, H = {h}, D = {d}", *three, " / ".join(f"{ratio:.2f} x" for ratio in ratios)]
        )
    return cells


def loss(all_rows: list[dict[str, str]]) -> Table:
    rows, shape = Rows(all_rows, "loss"), ("65536", "", "768")
    return [
        ["", "ms", "peak MiB"],
        *(
            [label, digits(rows.of(name, shape)), f"{rows.of(name, shape, 'peak_mib'):,.0f}"]
            for label, name in {
                "outside a compiled graph, chunks of 4,096 tokens": "loss eager, chunks of 4096",
                "chunks of 8,192 tokens (the default)": "loss eager, chunks of 8192",
                "chunks of 16,384 tokens": "loss eager, chunks of 16384",
                "inside a compiled graph": "loss compiled",
                "all logits at once, compiled": "loss with all logits, compiled",
            }.items()
        ),
    ]


def entropy(all_rows: list[dict[str, str]]) -> Table:
    rows, lengths = Rows(all_rows, "element"), (2048, 16384, 102400)
    cells = [["ms", *(f"T = {length:,}" for length in lengths)]]
    for label, name in {
        "full softmax": "full",
        "window of 512": "window 512",
        "Top-1 chunks of 128": "chunks 128",
    }.items():
        cells.append([label, *(digits(rows.of(f"entropy {name}", (str(length), "12", "64"))) for length in lengths)])
    return cells


def scan(all_rows: list[dict[str, str]]) -> Table:
    rows = Rows(all_rows, "scan")
    cells = [["tokens", "d", "ours", "ours, steps in bf16", "ours then", "mamba-ssm, CUDA", "times faster then"]]
    for shape in (
        ("32", "2048", "1536", "16"),
        ("32", "2048", "4096", "16"),
        ("1", "102400", "1536", "16"),
        ("1", "102400", "4096", "16"),
    ):
        b, t, d, _ = shape
        ratios = rows.ratios("mamba-ssm CUDA", "ours", shape)
        both = [rows.both("scan", shape), rows.both("scan, dt in bf16", shape), rows.both("ours", shape)]
        theirs = [rows.both("mamba-ssm CUDA", shape), " / ".join(f"{ratio:.2f}" for ratio in ratios)]
        cells.append([f"{b} x {int(t):,}", f"{int(d):,}", *both, *theirs])
    return cells


def around(all_rows: list[dict[str, str]]) -> Table:
    now, then = (
        Rows([row for row in all_rows if row["commit"].startswith(EARLIER) == earlier], "around")
        for earlier in (False, True)
    )
    cells = [["op", "ours", "PyTorch, compiled", "fla", "ours then", "published then"]]
    for label, op, width, fla, published in (
        (
            "`short_convolution` and SiLU, 1,792 channels",
            "short convolution",
            ("1792", "4"),
            "fla",
            "causal-conv1d CUDA",
        ),
        ("`qkv_convolution`, q and k of unit length, 2,304 channels", "qkv convolution", ("2304", "4"), "", ""),
        ("`gated_rms_norm`, 1,536 channels", "gated norm", ("1536", "64"), "", "mamba-ssm, without D x"),
    ):
        peers = [now.both(f"{op}, {peer}", width) if peer else "" for peer in ("seqarch", "PyTorch, compiled", fla)]
        peers += [then.both(f"{op}, {peer}", width) if published else "" for peer in ("seqarch", published)]
        cells.append([label, *peers])
    return cells


def tables(rows: list[dict[str, str]], h100: list[dict[str, str]]) -> Iterator[Table]:
    """All tables, in the order of the page, from the rows of an H200 and of an H100."""
    yield selection(rows)
    yield moba(h100)
    yield short(h100)
    yield growth(rows)
    yield decoding(rows)
    yield several(rows)
    yield scales(rows, SMALL, ("0.125", "1", "8", "16"))
    yield scales(rows, LARGE, ("0.0884", "1", "11.3", "16"))
    yield recorded(h100, "64", "0.125")
    yield recorded(h100, "128", "0.0884")
    yield element(rows)
    yield loss(rows)
    yield entropy(rows)
    yield scan(rows)
    yield around(rows)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print("\n\n".join(map(markdown, tables(*(read_csv(Path(path)) for path in sys.argv[1:])))))


if __name__ == "__main__":
    run(main)
