"""A recall exam from beginning to end: which points there are, each made or found, one file of results a task.

OUT/recall/<size>/<task>/<mixer>-<width>.json   a point, renewed after each test; `.pt` while it is being made
OUT/recall/<size>/<task>.json                   all points of a task, which the report reads
OUT/recall/<size>/<task>.csv, .png, .svg        the same as a table, and recall against state size
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import torch

from seqarch.errors import UserError, unknown
from seqarch.exam.code import digest, own_parts, parts_of
from seqarch.exam.models import parsed
from seqarch.exam.records import difference, fingerprint
from seqarch.mixers.registry import load_mixer, mixer_entries
from seqarch.recall.figure import draw, published_accuracy
from seqarch.recall.model import build, derived, state_elements
from seqarch.recall.settings import TASKS, Settings, find_settings
from seqarch.recall.train import Learner, Progress, train
from seqarch.runs.files import read_json, write_json
from seqarch.tables import markdown, readable
from seqarch.versions import version


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of a recall exam.

    Args:
        mixers: classes of mixers.
        tasks: names of tasks; all of them where there is none.
        size: "tiny" or "small"; MQAR also has "zoology".
        out: folder of exams.
        options: values by dotted keys: `mixer.n_heads` for the one mixer, `recall.epochs` for the settings.
    """

    mixers: Sequence[str]
    tasks: Sequence[str] = ()
    size: str = "tiny"
    out: str = "runs/exam"
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Point:
    """A mixer at a width, at one task: what is trained."""

    settings: Settings
    mixer: str
    title: str
    width: int
    options: Mapping[str, Any]
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"{self.title}-{self.width}.json"

    @property
    def fingerprint(self) -> str:
        """The settings, the options and the code that decide the point's numbers."""
        package = load_mixer(self.mixer).__module__.partition(".")[0]
        parts = [*own_parts(), Path(__file__).parent, *(parts_of(package) if package != "seqarch" else ())]
        asked = {**dataclasses.asdict(self.settings), "mixer": self.mixer, "width": self.width, **self.options}
        return fingerprint(asked, self.settings.seed, {}, digest(parts))


def run_recall(asked: Request) -> None:
    """Make what is missing of each point, write the results and print a table for each task.

    Raises:
        UserError: a name or an option is wrong, or a folder holds points of other settings or code.
    """
    changes, options = _options(asked)
    known = [entry.name for entry in mixer_entries()]
    for mixer in asked.mixers:
        if mixer not in known:
            raise unknown("mixer", mixer, known)
    found = [find_settings(task, asked.size, changes) for task in asked.tasks or TASKS]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for settings in found:
        folder = Path(asked.out) / "recall" / asked.size / settings.task
        print(f"{settings.task}, {asked.size}, {settings.epochs} epochs on {device.type}", flush=True)
        for mixer in asked.mixers:
            title = "-".join([mixer, *(f"{name}={value}" for name, value in options.items())])
            title = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", title)
            for width in settings.widths:
                _make(Point(settings, mixer, title, width, options, folder), device)
        points = collect(folder)
        print("\n".join(table(points)), flush=True)


def _options(asked: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    """The changes of settings and the options of the mixer."""
    groups: dict[str, dict[str, Any]] = {"recall": {}, "mixer": {}}
    for key, value in asked.options.items():
        group, _, name = key.partition(".")
        if group not in groups:
            raise UserError(f"--{key}: a recall exam takes --recall.SETTING and --mixer.OPTION")
        groups[group][name] = parsed(key, value)
    if groups["mixer"] and len(asked.mixers) > 1:
        raise UserError("--mixer.OPTION belongs to one mixer, but --mixer names several: examine them one by one")
    return groups["recall"], groups["mixer"]


def _make(point: Point, device: torch.device) -> None:
    """Train a point unless it is finished."""
    point.folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(point.path.with_suffix(".lock"), timeout=0)
    try:
        with lock:
            before = read_json(point.path) if point.path.is_file() else {}
            if before and before["fingerprint"] != point.fingerprint:
                why = difference(before["fingerprint"], point.fingerprint)
                raise UserError(f"{point.path} is another point, {why}: choose another --out, or delete that file")
            if not before.get("finished"):
                _train(point, device)
    except filelock.Timeout as error:
        raise UserError(f"another exam makes {point.path}: wait for it, or choose another --out") from error


def _train(point: Point, device: torch.device) -> None:
    settings = point.settings
    longest = max(example.inputs.shape[1] for example in settings.training(0))
    testing = settings.testing()
    length = max(example.inputs.shape[1] for example in testing)
    options = derived(settings, point.mixer, point.width, longest, point.options)
    learners = []
    for rate in settings.rates:
        model = build(settings, point.mixer, point.width, options, length).to(device)
        learners.append(Learner(model, rate, settings.weight_decay, settings.graphs))
    facts = {
        "task": settings.task,
        "mixer": point.title,
        "class": point.mixer,
        "options": options,
        "width": point.width,
        "state_elements": state_elements(learners[0].model, length),
        "parameters": learners[0].model.n_parameters(),
        "test_length": length,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "versions": {name: version(name) for name in ("seqarch", "torch", "triton")},
        "fingerprint": point.fingerprint,
        "settings": dataclasses.asdict(settings),
    }

    def note(progress: Progress) -> None:
        scores = progress.scores
        results = {
            "accuracy": scores.accuracy,
            "slices": scores.slices,
            **scores.measures,
            "rate": progress.rate,
            "epochs": progress.epochs,
            "seconds": round(progress.seconds, 1),
            "finished": progress.done,
        }
        write_json(point.path, {**facts, **results})
        print(
            f"{point.title} {point.width}: epoch {progress.epochs}, accuracy {scores.accuracy:.3f} "
            f"at {progress.rate:g}, {progress.seconds:.0f} s",
            flush=True,
        )

    checkpoint = point.path.with_suffix(".pt")
    train(settings, learners, testing, checkpoint, note)
    checkpoint.unlink()


def collect(folder: Path) -> list[dict[str, Any]]:
    """All points of a task, by mixer and width; written as the task's file, table and figure too."""
    points = [read_json(path) for path in sorted(folder.glob("*.json"))]
    points.sort(key=lambda point: (point["mixer"], point["width"]))
    write_json(folder.with_suffix(".json"), {"points": points})
    draw(points, folder)
    return points


def table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The points as Markdown."""
    slices = list(dict.fromkeys(name for point in points for name in point["slices"]))
    measured = ["tvd"] if any("tvd" in point for point in points) else []
    known = [published_accuracy(point) for point in points]
    others = ["published"] if any(each is not None for each in known) else []
    rows = [["mixer", "width", "state", "accuracy", *others, *measured, *slices, "rate", "epochs", "seconds"]]
    for point, other in zip(points, known, strict=True):
        state = point["state_elements"]
        rows.append([point["mixer"], str(point["width"]), "-" if state is None else readable(state)])
        rows[-1] += [f"{point['accuracy']:.3f}{'' if point['finished'] else ' so far'}"]
        rows[-1] += ["" if other is None else f"{other:.2f}" for _ in others]
        rows[-1] += [f"{point[name]:.3f}" for name in measured]
        rows[-1] += [f"{point['slices'][name]:.2f}" if name in point["slices"] else "" for name in slices]
        rows[-1] += [f"{point['rate']:g}", str(point["epochs"]), f"{point['seconds']:.0f}"]
    return markdown(rows)
