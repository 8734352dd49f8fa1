"""What the exam notes in a run folder, and the cache in which the runs of the reference are found again.

RUN/exam.json      fingerprint, minutes, and where a run was copied from
CACHE/exam/KEY     for each fingerprint the run folder of the reference that has it
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seqarch.data.corpus import cache_folder
from seqarch.report.costs import EXAM_NOTE as NOTE
from seqarch.training.checkpoint import newest_checkpoint
from seqarch.training.run_folder import CONFIG, CURVES, RECORD, read_record

KEPT = (CONFIG, RECORD, CURVES)
WHERE_IT_RUNS = {
    "": ("run_dir", "checkpoint", "ckpt_path"),
    "trainer": ("devices", "num_nodes", "strategy", "enable_progress_bar"),
    "data": ("root", "num_workers", "micro_batch_size"),
}
"""Keys of a recipe that do not change what is trained."""


def fingerprint(recipe: Mapping[str, Any], seed: int, checksums: Mapping[str, str], code: str) -> str:
    """What makes a run the same run: recipe, seed and the data's checksums, as one digest, and the code's."""
    what = copy.deepcopy(dict(recipe))
    for section, keys in WHERE_IT_RUNS.items():
        for key in keys:
            (what if not section else what.get(section) or {}).pop(key, None)
    parts = {"recipe": what, "seed": seed, "data": dict(checksums)}
    return f"{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]}-{code}"


def difference(before: str, now: str) -> str:
    """Why runs of two fingerprints are different runs."""
    asked, _, code = before.partition("-")
    if code and asked != now.partition("-")[0]:
        return "it was made with another recipe or data"
    return "the code of seqarch or of the model has changed since it was made"


def status(run: Path) -> str:
    """The status in `run.json`, "missing" where there is no run."""
    return str(read_record(run).get("status")) if (run / RECORD).is_file() else "missing"


def is_finished(run: Path) -> bool:
    return status(run) == "finished"


def has_begun(run: Path) -> bool:
    """Whether a run has taken a step: its curves go beyond the start, or there is a checkpoint."""
    rows = (run / CURVES).read_text().splitlines()[1:] if (run / CURVES).is_file() else []
    return any(not row.startswith("0,") for row in rows) or newest_checkpoint(run) is not None


def read_note(run: Path) -> dict[str, Any]:
    """`exam.json` of a run folder, empty where there is none."""
    path = run / NOTE
    return json.loads(path.read_text()) if path.is_file() else {}


def minutes_used(run: Path) -> float:
    """Minutes of all attempts at a run so far; of one that was killed, up to the last row of its curves.

    `start` stands in the note while an attempt goes on: its time, earlier by what the attempts before it took.
    """
    note = read_note(run)
    if note.get("start") and (run / CURVES).is_file():
        return max(0.0, (run / CURVES).stat().st_mtime - note["start"]) / 60
    return note.get("minutes", 0.0)


def write_note(run: Path, **note: Any) -> None:
    """Add to `exam.json` of a run folder."""
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / NOTE, {**read_note(run), **note})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that is complete or not there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)


def remember(run: Path, key: str) -> None:
    """Let later exams find this run by its fingerprint."""
    folder = cache_folder() / "exam"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / key, {"run": str(run.resolve())})


def reuse(run: Path, key: str) -> Path | None:
    """Copy a finished run with this fingerprint to `run`, without its checkpoints; where it was, if there is one."""
    pointer = cache_folder() / "exam" / key
    if not pointer.is_file():
        return None
    source = Path(json.loads(pointer.read_text())["run"])
    if source == run.resolve() or not is_finished(source) or read_note(source).get("fingerprint") != key:
        return None
    run.mkdir(parents=True, exist_ok=True)
    if (source / "evaluations").is_dir():
        shutil.copytree(source / "evaluations", run / "evaluations", dirs_exist_ok=True)
    for name in KEPT:
        shutil.copy2(source / name, run / name)
    write_note(run, **{**read_note(source), "reused_from": str(source)})
    return source
