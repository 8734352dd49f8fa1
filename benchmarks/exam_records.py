"""Keep the records of exam runs in the repository, and unpack them again next to later runs.

    python benchmarks/exam_records.py pack RUNS RECORDS      # RUNS/NAME/seed_N of an exam, such as runs/exam/small
    python benchmarks/exam_records.py unpack RECORDS RUNS

`pack` writes `NAME-seed_N.tar.xz` for each run that has a finished model: the run folder and its branches without
checkpoints and TensorBoard events. The same run gives the same bytes. `unpack` leaves a run that is there already as it
is. Both print what they wrote.
"""

from __future__ import annotations

import io
import lzma
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from seqarch.runs.layout import CONFIG, CURVES, EVALUATIONS, EXAM_NOTE, RECORD, branches
from seqarch.runs.record import is_finished

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


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("pack", "unpack"):
        sys.exit(__doc__)
    for path in {"pack": pack, "unpack": unpack}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3])):
        print(path, f"{path.stat().st_size:,} bytes" if path.is_file() else "")
