"""Keep the records of exam runs in the repository, and unpack them again next to later runs.

    python benchmarks/exam_records.py pack RUNS RECORDS      # RUNS/NAME/seed_N of an exam, such as runs/exam/small
    python benchmarks/exam_records.py unpack RECORDS RUNS
    python benchmarks/exam_records.py merge RECORDS RUNS     # branches that a run of RUNS lacks

`pack` writes `NAME-seed_N.tar.xz` for each run that has a finished model: the run folder and its branches without
checkpoints and TensorBoard events. The same run gives the same bytes. `unpack` leaves a run that is there already as it
is. `merge` adds finished models at other budgets to runs of the same model, learning rate and seed, whose constant rate
makes them branches of one run. All print what they wrote.
"""

from __future__ import annotations

import io
import lzma
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from seqarch.runs.folder import CONFIG, CURVES, EVALUATIONS, EXAM_NOTE, RECORD, branches, is_finished, read_config
from seqarch.runs.keys import flatten

KEPT = (CONFIG, CURVES, RECORD, EXAM_NOTE)


def files(run: Path) -> Iterator[Path]:
    """What a report reads of a run and of its branches, sorted."""
    for folder in (run, *branches(run)):
        yield from (folder / name for name in sorted(KEPT) if (folder / name).is_file())
        yield from sorted((folder / EVALUATIONS).glob("step_*.npz"))


def pack(folder: Path, out: Path) -> list[Path]:
    """Write the archive of each run with a finished model; return the archives."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for run in sorted(folder.glob("*/seed_*")):
        if not any(map(is_finished, (run, *branches(run)))):
            continue
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for path in files(run):
                entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
                entry.size = len(data := path.read_bytes())
                archive.addfile(entry, io.BytesIO(data))
        path = out / f"{run.parent.name}-{run.name}.tar.xz"
        path.write_bytes(lzma.compress(content.getvalue(), preset=9 | lzma.PRESET_EXTREME))
        written.append(path)
    return written


def unpack(archives: Path, folder: Path) -> list[Path]:
    """Unpack the archives of `archives` into `folder`; return the runs that were not there."""
    written = []
    for path in sorted(archives.glob("*.tar.xz")):
        with tarfile.open(path) as archive:
            run = folder.joinpath(*Path(archive.getnames()[0]).parts[:2])
            if not run.exists():
                archive.extractall(folder, filter="data")
                written.append(run)
    return written


def merge(archives: Path, folder: Path) -> list[Path]:
    """Copy the branches that the runs in `folder` lack from archives of the same runs; return the branches.

    The same run has the same name, seed and options of the model: at another learning rate it is another run.
    """
    written = []
    with tempfile.TemporaryDirectory() as place:
        for other in unpack(archives, Path(place)):
            run = folder / other.relative_to(place)
            for branch in branches(other) if run.exists() else ():
                one, two = (flatten(read_config(each)["model"]) for each in (run, branch))
                same = all(one[key] == two[key] for key in one.keys() & two.keys())  # a later version has more options
                if same and not (copy := run / branch.relative_to(other)).exists():
                    written.append(Path(shutil.copytree(branch, copy)))
    return written


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("pack", "unpack", "merge"):
        sys.exit(__doc__)
    for path in {"pack": pack, "unpack": unpack, "merge": merge}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3])):
        print(path, f"{path.stat().st_size:,} bytes" if path.is_file() else "")
