"""The small files of a run folder: `run.json`, `config.yaml` and an exam's note, read and written."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from seqarch.errors import UserError
from seqarch.runs.files import read_json, write_json, write_text
from seqarch.runs.layout import CONFIG, CURVES, EVENTS, EXAM_NOTE, RECORD, TENSORBOARD, newest_checkpoint
from seqarch.safe_yaml import load

NOTE: dict[str, Callable[[Any], bool]] = {
    "fingerprint": lambda value: isinstance(value, str),
    **dict.fromkeys(("start", "minutes"), lambda value: isinstance(value, int | float) and abs(value) < 2**53),
}
"""The keys of an exam's note, each with a check of its value."""


def read_record(run: Path) -> dict[str, Any]:
    """`run.json` of a run folder.

    Raises:
        UserError: the file is damaged.
    """
    return read_json(run / RECORD)


def write_record(run: Path, record: dict[str, Any]) -> None:
    """Write `run.json` of a run folder."""
    write_json(run / RECORD, record)


def status(run: Path) -> str:
    """The status in `run.json`, "missing" if there is no run."""
    return str(read_record(run).get("status")) if (run / RECORD).is_file() else "missing"


def is_finished(run: Path) -> bool:
    """Whether a run folder holds a run that took all of its steps."""
    return status(run) == "finished"


def has_diverged(run: Path) -> bool:
    """Whether a run ended because a loss or a gradient was not a finite number."""
    return (run / RECORD).is_file() and read_record(run).get("diverged") is True


def read_config(run: Path) -> dict[str, Any]:
    """`config.yaml` of a run folder: the resolved configuration; errors as for `read_record`."""
    if not isinstance(config := load(run / CONFIG), dict):
        raise UserError(f"{run / CONFIG}: expected a mapping, the configuration that seqarch fit wrote")
    return config


def write_config(run: Path, config: dict[str, Any]) -> None:
    """Write `config.yaml` of a run folder."""
    write_text(run / CONFIG, yaml.safe_dump(config, sort_keys=False))


def read_note(run: Path) -> dict[str, Any]:
    """`exam.json` of a run folder, empty if there is none; errors as for `read_record`."""
    path = run / EXAM_NOTE
    if not path.is_file():
        return {}
    note = read_json(path)
    for key, fits in NOTE.items():
        if not (note.get(key) is None or fits(note[key])):
            raise UserError(f"{path} is not a note of an exam: '{key}' is {note[key]!r:.80}; remove the file")
    return note


def write_note(run: Path, **note: Any) -> None:
    """Add to `exam.json` of a run folder."""
    write_json(run / EXAM_NOTE, {**read_note(run), **note})


@contextlib.contextmanager
def explain_salvage(run: Path) -> Iterator[None]:
    """Adds to a `UserError` about a file of a run folder what of the run can still be used."""
    try:
        yield
    except UserError as error:
        scalars = [TENSORBOARD, f"{EVENTS}*"] if CURVES in str(error) else [CURVES]
        usable = [f"{name} (its scalars)" for name in scalars if any(run.glob(name))]
        if checkpoint := newest_checkpoint(run):
            usable.append(f"{checkpoint.relative_to(run)} (its weights)")
        raise UserError(f"{error}; still usable of this run: {' and '.join(usable) or 'nothing'}") from None
