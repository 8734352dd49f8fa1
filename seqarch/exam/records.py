"""The exam's notes in a run folder, and the cache that keeps the runs of the reference.

RUN/exam.json      fingerprint, minutes, and where a run was copied from
CACHE/exam/KEY     for each fingerprint the run folder of the reference that has it
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from seqarch.data.verified import cache_folder
from seqarch.runs import files
from seqarch.runs.curves import read_rows
from seqarch.runs.files import read_json, write_json
from seqarch.runs.keys import without
from seqarch.runs.layout import CHECKPOINTS, CURVES, RECORD, TENSORBOARD, newest_checkpoint
from seqarch.runs.record import is_finished, read_note, write_note


def fingerprint(recipe: Mapping[str, Any], seed: int, checksums: Mapping[str, str], code: str) -> str:
    """The identity of a run: one digest of recipe, seed and the data's checksums, and one of the code."""
    parts = {"recipe": without(recipe, "exam"), "seed": seed, "data": dict(checksums)}
    return f"{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]}-{code}"


def difference(before: str, now: str) -> str:
    """Why two fingerprints mean different runs."""
    asked, _, code = before.partition("-")
    if code and asked != now.partition("-")[0]:
        return "it was made with another recipe or data"
    return "the code of seqarch or of the model has changed since it was made"


def locked(lock: Path, does: str) -> AbstractContextManager[None]:
    """Hold a lock file. If another exam holds it, the refusal says what that exam does."""
    return files.locked(lock, f"another exam {does}: wait for it, or choose another --out")


def has_begun(run: Path) -> bool:
    """Whether a run has taken a step: its curves go beyond the start, or there is a checkpoint."""
    _, rows = read_rows(run / CURVES)
    return any(float(row["step"]) > 0 for row in rows) or newest_checkpoint(run) is not None


def minutes_used(run: Path) -> float:
    """Minutes of all attempts at a run so far; a killed attempt counts up to the last row of its curves.

    During an attempt the note has `start`: its time, minus the duration of earlier attempts.
    """
    note = read_note(run)
    if note.get("start") and (run / CURVES).is_file():
        return max(0.0, (run / CURVES).stat().st_mtime - note["start"]) / 60
    return note.get("minutes", 0.0)


def remember(run: Path, key: str) -> None:
    """Let later exams find this run by its fingerprint."""
    write_json(cache_folder() / "exam" / key, {"run": str(run.resolve())})


def remembered(run: Path, key: str) -> Path | None:
    """Another finished run with this fingerprint, that later exams take in place of `run`."""
    pointer = cache_folder() / "exam" / key
    if not pointer.is_file():
        return None
    source = Path(str(read_json(pointer).get("run")))
    if source == run.resolve() or not is_finished(source) or read_note(source).get("fingerprint") != key:
        return None
    return source


def reuse(run: Path, key: str) -> Path | None:
    """Copy the `remembered` run to `run`, without checkpoints; return where it was, or `None`."""
    if (source := remembered(run, key)) is None:
        return None
    # a copy that was cut short has no record, and counts as missing
    left_out = {CHECKPOINTS, TENSORBOARD}
    last = {str(source): {RECORD}}
    shutil.copytree(source, run, ignore=lambda at, _: left_out | last.get(str(at), set()), dirs_exist_ok=True)
    shutil.copy2(source / RECORD, run / RECORD)
    write_note(run, **{**read_note(source), "reused_from": str(source)})
    return source
