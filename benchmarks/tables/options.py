"""What document masks, Muon and large vocabularies cost, and what masks do to drafts.

python -m benchmarks.tables.options

writes docs/results/masks.csv and optimizers.csv from the records in benchmarks/exam_draft.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.budget_tables import losses, pairs
from benchmarks.budget_tables import rate as learning_rate
from benchmarks.exam_records import unpack
from benchmarks.tables.kernels import Rows, Table, digits
from benchmarks.tables.kernels import read as kernels
from benchmarks.tables.results import RESULTS
from benchmarks.tables.speed import FOLDER, rate, read
from seqarch.report.runs import Run, load_run
from seqarch.tables import read_csv, write_csv

MASKS = RESULTS / "masks.csv"
OPTIMIZERS = RESULTS / "optimizers.csv"
MASKED, MUON = "-mask", "-muon"
COMPARED = "mamba2"
"""The reference of the gaps: its runs with and without a mask are complete."""


def _pairs(rows: list[dict[str, str]], option: str, first: str, second: str) -> Table:
    """A line for each recipe that was timed with both values of the option in one call."""
    rates = {(row["name"], row[option]): row for row in rows if row["tokens_per_s"]}
    table = []
    for name in dict.fromkeys(row["name"] for row in rows):
        if {(name, first), (name, second)} <= rates.keys():
            without, with_it = (rates[name, value] for value in (first, second))
            ratio = float(with_it["tokens_per_s"]) / float(without["tokens_per_s"])
            table.append([f"`{name}`", rate(without), rate(with_it), f"{ratio:.2f}"])
    return table


def documents_speed() -> Table:
    """Training with and without a document mask, documents of 500 tokens."""
    table = [["recipe", "without a mask, tokens/s", "with a mask", "ratio"]]
    return table + _pairs(read("documents"), "documents", "", "500")


def flash4_step(documents: str = "") -> str:
    """Tokens per second of Transformer++ without and with FlashAttention-4, timed on one card."""
    without, with_it = (rate(row) for row in read("flash4") if row["documents"] == documents)
    return f"{without} to {with_it}"


def optimizers_speed() -> str:
    """The speed of training with Muon over the speed with AdamW, by recipe."""
    return " and ".join(ratio for *_, ratio in _pairs(read("optimizers"), "optimizer", "AdamW", "Muon"))


def documents_attention() -> Table:
    """Softmax attention to packed documents, forward and backward, next to dense attention to rows of 2,048 tokens."""
    rows = Rows(kernels(), "documents")
    table = [["heads", "mean length", "FlexAttention, ms", "FlashAttention (varlen), ms", "dense cuDNN, ms"]]
    for rows_of, heads, dim in (("32", "12", "64"), ("16", "16", "128")):
        packed = (str(int(rows_of) * 2048), heads, dim)
        dense = rows.of("dense cuDNN fwd+bwd", (rows_of, "2048", heads, dim))
        for length in ("500", "2000"):
            times = [rows.of(f"{kernel}, documents of {length} fwd+bwd", packed) for kernel in ("flex", "varlen")]
            cells = [digits(each) for each in (*times, dense)]
            table.append([f"{heads} of {dim}", f"{int(length):,}", *cells])
    return table


def vocabularies() -> Table:
    """The loss of 16,384 tokens, and training, with 32,000 and 131,072 entries."""
    steps = {row["vocab_size"]: row for row in read("vocabularies")}
    rows = Rows(kernels(), "vocabularies")
    table = [["entries", "loss compiled: ms, MiB", "all logits: ms, MiB", "`transformer_pp_110m`, tokens/s", "memory"]]
    for size, step in steps.items():
        cells = []
        for name in ("loss compiled", "loss with all logits, compiled"):
            time, peak = (
                rows.of(f"{name}, {int(size):,} entries", ("16384", "", "768"), key) for key in ("p50", "peak_mib")
            )
            cells.append(f"{digits(time)}, {peak:,.0f}")
        table.append([f"{int(size):,}", *cells, rate(step), f"{float(step['peak_gib']):.1f} GiB"])
    return table


def masks() -> Table:
    """Drafts with and without a document mask."""
    rows = {(row["model"], row["mask"]): row for row in read_csv(MASKS)}
    table = [
        ["model", "in-domain loss", "with a mask", "OOD loss", "with a mask", f"gap to `{COMPARED}`", "with a mask"]
    ]
    for name in dict.fromkeys(name for name, _ in rows):
        both = [rows.get((name, mask)) for mask in ("no", "yes")]
        cells = []
        for key, form in (("in_domain", "{:.3f}"), ("ood", "{:.3f}"), ("gap", "{:+.3f}")):
            cells += [form.format(float(row[key])) if row and row[key] else "-" for row in both]
        table.append([f"`{name}`", *cells])
    return table


def optimizers() -> Table:
    """Drafts with AdamW and with Muon, each at the best of its rates."""
    rows = read_csv(OPTIMIZERS)
    table = [["model", "AdamW, in-domain loss", "Muon", "rate", f"gap to `{COMPARED}`, AdamW", "Muon"]]
    for name in dict.fromkeys(row["model"] for row in rows):
        adamw, *muon = [row for row in rows if row["model"] == name]
        best = min(muon, key=lambda row: float(row["in_domain"]))
        gaps = [f"{float(row['gap']):+.3f}" if row["gap"] else "-" for row in (adamw, best)]
        cells = [f"{float(row['in_domain']):.3f}" for row in (adamw, best)]
        table.append([f"`{name}`", *cells, f"{float(best['learning_rate']):g}", *gaps])
    return table


def _drafts(runs: list[Run]) -> Iterator[tuple[Run, int, str, str, float | str]]:
    """Each run with its tokens, last in-domain loss, mean over the five OOD domains, and gap among these runs."""
    gaps = {(name, tokens): gap for name, _, tokens, gap in pairs(runs, COMPARED)}
    last = {row[0]: row for row in losses(runs)}
    for run in runs:
        _, _, _, tokens, in_domain, ood, *_ = last[run.name]
        yield run, tokens, in_domain, ood, gaps.get((run.name, tokens), "")


def write(masks: Path = MASKS, optimizers: Path = OPTIMIZERS) -> None:
    """The last losses and the gaps of drafts: among runs with a mask, among runs with Muon and among the others.

    Muon's gaps are those between each model's best rates.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = {path.parent.name: load_run(path) for path in sorted(unpack(FOLDER / "exam_draft", Path(folder)))}
        plain = list(_drafts([run for name, run in runs.items() if "-" not in name]))
        masked = list(_drafts([run for name, run in runs.items() if name.endswith(MASKED)]))
        rows = [(run.name, mask, *rest) for mask, found in (("no", plain), ("yes", masked)) for run, *rest in found]
        write_csv(masks, ("model", "mask", "tokens", "in_domain", "ood", "gap"), sorted(rows))
        tried: dict[str, list[tuple]] = {}
        for name, run in runs.items():
            model, muon, _ = name.partition(MUON)
            if muon:
                tried.setdefault(model, []).extend(_drafts([dataclasses.replace(run, name=model)]))
        best = [min(rates, key=lambda row: float(row[2]))[0] for rates in tried.values()]
        others = [row for rates in tried.values() for row in rates if all(row[0] is not run for run in best)]
        kinds = {"Muon": [*_drafts(best), *others], "AdamW": [row for row in plain if row[0].name in tried]}
        rows = [
            (run.name, kind, learning_rate(run), loss, gap) for kind in kinds for run, _, loss, _, gap in kinds[kind]
        ]
    write_csv(optimizers, ("model", "optimizer", "learning_rate", "in_domain", "gap"), sorted(rows))


if __name__ == "__main__":
    write()
