"""`seqarch bench kernels`: checks the ops on a GPU against float64 references, then times them and dense attention."""

import dataclasses
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from seqarch.bench.rows import Row, Table, require, shown
from seqarch.errors import UserError, unknown


@dataclasses.dataclass(frozen=True)
class Step:
    """One part of the benchmark: what yields its rows ("module:function" of this package) and a line of help."""

    function: str
    help: str
    by_default: bool = True

    def start(self, **options: Any) -> Iterator[Any]:
        """The rows to come. A step that lacks something raises its error here."""
        return pkgutil.resolve_name(f"seqarch.bench.{self.function}")(**options)


STEPS = {
    "check": Step("kernels_check:checks", "outputs and gradients against float64; a failure ends the run"),
    "limits": Step("kernels_time:limits", "the rates of a bf16 product and of a copy, which limit all others"),
    "time": Step("kernels_time:time", "Top-1 chunk attention next to dense attention, 102,400 and 2,048 tokens"),
    "skew": Step("kernels_time:skew", "the same with 90 % of the queries on one chunk"),
    "remote": Step("kernels_time:remote", "up to eight remote chunks per query, 102,400 tokens"),
    "trained": Step("kernels_trained:rows", "exact selection on random and recorded vectors"),
    "growth": Step("kernels_time:growth", "1,048,576 tokens"),
    "element": Step("element:rows", "Top-1 element attention"),
    "decode": Step("decode:rows", "one new token against cached keys"),
    "loss": Step("kernels_time:loss", "linear cross-entropy next to a loss with all logits"),
    "scan": Step("scan:rows", "the selective scan of Mamba-1, next to mamba-ssm's CUDA kernel"),
    "around": Step("around:rows", "short convolutions and Mamba-2's gated norm, next to other kernels"),
    "cold": Step("kernels_cold:rows", "first calls in new processes with empty compile caches"),
    "moba": Step("kernels_moba:rows", "MoBA's published code, which must be installed", by_default=False),
    "profile": Step("kernels_time:profile", "where the time goes, by CUDA kernel", by_default=False),
}
DEFAULT = tuple(name for name, step in STEPS.items() if step.by_default)
COLUMNS = ("step", "name", "B", "T", "H", "D", "p20", "p50", "p80", "unit", "peak_mib", "times_dense")


def bench_kernels(steps: Sequence[str] = DEFAULT, csv: Path | None = None, recorded: Path | None = None) -> None:
    """Run steps in the order of `STEPS`; print each row and write all to `csv`. `recorded` is for `trained`.

    Raises:
        UserError: an unknown step, no NVIDIA GPU, a folder that does not exist, a published code not installed.
        SystemExit: a check failed.
    """
    for name in steps:
        if name not in STEPS:
            raise unknown("step", name, STEPS)
    import torch

    if not torch.cuda.is_available():
        raise UserError("bench kernels needs an NVIDIA GPU, and PyTorch sees none here")
    given = {"trained": {"recorded": recorded}}
    chosen = {name: step.start(**given.get(name, {})) for name, step in STEPS.items() if name in steps}
    torch.manual_seed(0)
    run_steps(chosen, Table(COLUMNS, csv, line))


def run_steps(steps: Mapping[str, Iterator[Any]], table: Table) -> None:
    """Take what each step yields: whether a check holds, or the rows of a timing. Checks give one row, their number."""
    for name, results in steps.items():
        if name == "check":
            results = iter([{"name": "checks", "p50": require(results), "unit": "passed"}])
        for row in results:
            table.add({"step": name, **row})


def line(row: Row) -> str:
    """A row for the terminal."""
    shape = " ".join(f"{key}={row[key]}" for key in "BTHD" if row.get(key) is not None)
    head = f"{row['name']:44s} {shape:28s} {row['p50']:10.3f} {row.get('unit') or 'ms'}"
    return shown(
        {**row, "head": head}, "{head}", "[{p20:.3f}, {p80:.3f}]", "+{peak_mib:.0f} MiB", "{times_dense:.1f} x dense"
    )
