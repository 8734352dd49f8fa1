"""`seqarch bench kernels`: times ops on a GPU next to every dense baseline of `timing.DENSE`."""

import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from seqarch.bench.jobs import Row, Table, shown
from seqarch.errors import UserError, check_known


class Step(NamedTuple):
    """One part of the benchmark: what yields its rows, as "module:function", and a line of help."""

    function: str
    help: str


STEPS = {
    "limits": Step("seqarch.bench.timing:limits", "rates of a bf16 product and of a copy, which limit all others"),
    "time": Step("seqarch.bench.timing:time", "Top-1 chunk attention, 102,400 and 2,048 tokens"),
    "element": Step("seqarch.bench.timing:element", "Top-1 element attention, and entropies of attention"),
}
COLUMNS = ("step", "name", "B", "T", "H", "D", "p20", "p50", "p80", "unit", "peak_mib", "times_dense")


def bench_kernels(names: Sequence[str], csv: Path | None = None, steps: Mapping[str, Step] = STEPS) -> None:
    """Run the named `steps`, in their order there; print each row and write all to `csv`.

    Raises:
        UserError: an unknown step, no NVIDIA GPU, a folder that does not exist, a package not installed.
    """
    for name in names:
        check_known("step", name, steps)
    import torch

    if not torch.cuda.is_available():
        raise UserError("bench kernels needs an NVIDIA GPU, and PyTorch sees none here")
    # a step that lacks something raises its error here
    chosen = {name: pkgutil.resolve_name(step.function)() for name, step in steps.items() if name in names}
    torch.manual_seed(0)
    table = Table(COLUMNS, csv, line)
    for name, rows in chosen.items():
        for row in rows:
            table.add({"step": name, **row})


def line(row: Row) -> str:
    """A row for the terminal."""
    shape = " ".join(f"{key}={row[key]}" for key in "BTHD" if row.get(key) is not None)
    head = f"{row['name']:44s} {shape:28s} {row['p50']:10.3f} {row.get('unit') or 'ms'}"
    return shown(
        {**row, "head": head}, "{head}", "[{p20:.3f}, {p80:.3f}]", "+{peak_mib:.0f} MiB", "{times_dense:.1f} x dense"
    )
