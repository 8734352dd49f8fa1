"""A run folder: where things are in it, and its small files, read and written.

RUN/config.yaml        the resolved configuration
RUN/run.json           what ran: model, data, versions, hardware, commit
RUN/curves.csv         every scalar of the run
RUN/evaluations/step_N.npz                  the loss of each evaluation sequence (`ood_loss.keep_sequences`)
RUN/evaluations/step_N/TASK.json            what `seqarch eval` found (`seqarch.runs.results`)
RUN/evaluations/step_N/TASK.samples.npz     its numbers by sample
RUN/checkpoints/       the newest checkpoints; each is a file, or a folder (`seqarch.training.sharded.folder`)
RUN/events.out.tfevents.*       the same scalars for TensorBoard; RUN/tensorboard/ in runs of earlier versions
RUN/profile/           traces of steps, from `fit --profile`
RUN/tokenizer/         the files of the tokenizer, if it has any (`seqarch.data.tokenizer_files`)
RUN/exam.json          what an exam notes about the run
RUN/lock               the process that trains here, while it does
RUN/branches/          run folders of the same training with fewer steps (`seqarch.training.run_folder`)
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from seqarch.errors import UserError
from seqarch.runs.files import check_folder, read_json, write_json, write_text
from seqarch.safe_yaml import load

CONFIG, RECORD, CURVES = "config.yaml", "run.json", "curves.csv"
EVALUATIONS, CHECKPOINTS, TENSORBOARD, BRANCHES = "evaluations", "checkpoints", "tensorboard", "branches"
EXAM_NOTE, LOCK, TOKENIZER, PROFILE = "exam.json", "lock", "tokenizer", "profile"
INDEX = "index.json"
"""What a folder holds that is a checkpoint."""
OWN = (CONFIG, RECORD, EVALUATIONS, CHECKPOINTS, TENSORBOARD, EXAM_NOTE, LOCK, TOKENIZER)
"""What a run folder may hold where its configuration is missing."""
EVENTS = "events.out.tfevents."
"""The beginning of the names of TensorBoard's files."""
_SEED = re.compile(r"seed_\d+")
_STEP = re.compile(r"step_[0-9]{1,18}")


def run_name(run: Path) -> str:
    """The name of a run: its folder's name, or `mamba2` for `mamba2/seed_0`; a branch has its trunk's name."""
    if run.parent.name == BRANCHES:
        run = run.parents[1]
    return run.parent.name if _SEED.fullmatch(run.name) and run.parent.name else run.name


def event_folder(run: str | Path) -> Path:
    """Where the files of TensorBoard lie: in the run folder itself, so that it names the run in TensorBoard."""
    old = Path(run) / TENSORBOARD
    return old if old.is_dir() else Path(run)


def checkpoint_path(run: str | Path, step: int) -> Path:
    """The checkpoint that a run writes after an optimizer step."""
    return Path(run) / CHECKPOINTS / f"step_{step:08d}.ckpt"


def is_sharded(checkpoint: str | Path) -> bool:
    """Whether a checkpoint is a folder, to which each process wrote its own part."""
    return (Path(checkpoint) / INDEX).is_file()


def checkpoints(run: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return _by_step(Path(run) / CHECKPOINTS, ".ckpt")


def newest_checkpoint(run: str | Path) -> Path | None:
    """The newest checkpoint of a run, `None` if there is none."""
    return next(reversed(checkpoints(run)), None)


def named_checkpoint(path: str | Path) -> Path:
    """The checkpoint; of a run folder its newest, if it has one. Refuse "", the folder that the user is in."""
    if path == "":
        raise UserError("the name of the checkpoint is empty: name a file or a run folder")
    if newest := newest_checkpoint(path):
        check_folder(Path(path), written=False)
    return newest or Path(path)


def run_of(checkpoint: Path) -> Path:
    """The run folder that a checkpoint lies in, or the folder of a checkpoint that lies elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent


def evaluation_path(run: str | Path, step: int) -> Path:
    """The losses by evaluation sequence that a run writes after an optimizer step."""
    return Path(run) / EVALUATIONS / f"step_{step:08d}.npz"


def evaluation_paths(run: str | Path) -> list[Path]:
    """All files of `evaluation_path` in a run folder, the earliest step first."""
    return _by_step(Path(run) / EVALUATIONS, ".npz")


def result_path(run: str | Path, step: int, task: str) -> Path:
    """The result file of `seqarch eval` for a task at the checkpoint of an optimizer step."""
    return Path(run) / EVALUATIONS / f"step_{step:08d}" / f"{task}.json"


def result_paths(run: str | Path) -> list[Path]:
    """All files of `result_path` in a run folder, the earliest step first."""
    return [path for step in _by_step(Path(run) / EVALUATIONS) for path in sorted(step.glob("*.json"))]


def branch_path(run: str | Path, steps: int) -> Path:
    """The branch of a run that has `steps` steps in all."""
    return Path(run) / BRANCHES / f"step_{steps:08d}"


def branches(run: str | Path) -> list[Path]:
    """The branches of a run that were begun, shortest first."""
    return [path for path in _by_step(Path(run) / BRANCHES) if path.is_dir()]


def _by_step(folder: Path, suffix: str = "") -> list[Path]:
    """The entries of a folder that are named by their step, lowest first; entries with other names are left out."""
    named = (path for path in folder.glob(f"step_*{suffix}") if _STEP.fullmatch(path.name.removesuffix(suffix)))
    return sorted(named, key=step_of)


def step_of(path: Path) -> int:
    """The number in the name of a checkpoint, an evaluation or a branch."""
    return int(path.stem.removeprefix("step_"))


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


def config_of(checkpoint: Path) -> dict[str, Any]:
    """`config.yaml` of the run folder that a checkpoint lies in, empty if there is none; errors as `read_record`."""
    run = run_of(checkpoint)
    return read_config(run) if checkpoint.parent.name == CHECKPOINTS and (run / CONFIG).is_file() else {}


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
