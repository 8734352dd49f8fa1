"""A recall exam from beginning to end: the points, each made or found, and one file of results per task.

OUT/recall/<size>/<task>/<mixer>-<width>.json   a point, renewed after each test
OUT/recall/<size>/<task>/<mixer>-<width>.*.pt   while it is being made: the models and optimizers, to go on from
OUT/recall/<size>/<task>.json                   all points of a task, which the report reads
OUT/recall/<size>/<task>.csv, .png, .svg        the same as a table, and recall against state size
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from seqarch.errors import UserError, say
from seqarch.exam.derive import mixer_options, titled
from seqarch.exam.plan import code_digest, difference, fingerprint
from seqarch.experiment.tree import read_text
from seqarch.mixers.registry import load_mixer
from seqarch.runs.files import check_folder, locked, read_json, write_json
from seqarch.tables import markdown, readable
from seqarch.versions import version
from seqarch_recall.figure import draw, published_accuracy
from seqarch_recall.model import build, derived
from seqarch_recall.settings import TASKS, Settings, find_settings
from seqarch_recall.train import Learner, Progress, train

KINDS: dict[str, Any] = {
    **dict.fromkeys(("width", "accuracy", "rate", "epochs", "seconds", "test_length", "finished"), (int, float)),
    **dict.fromkeys(("mixer", "class", "fingerprint"), str),
    **dict.fromkeys(("options", "slices", "settings"), dict),
    "state_elements": (int, type(None)),
}
"""The facts that the file of a point must hold, and their types."""


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
        asked = {**dataclasses.asdict(self.settings), "mixer": [self.mixer, self.options], "width": self.width}
        return fingerprint(asked, self.settings.seed, {}, code_digest({package} - {"seqarch"}, Path(__file__).parent))


def run_recall(
    mixers: Sequence[str], tasks: Sequence[str], size: str, out: str, options: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Make the missing parts of each point, write the results and print a table for each task.

    Args:
        mixers: mixers by their classes.
        tasks: names of tasks; none means all of them.
        size: the size in `settings.yaml`.
        out: the folder of exams.
        options: values as text: `mixer.n_heads` for the one mixer, `epochs` for the settings.

    Raises:
        UserError: a name or an option is wrong, or a folder holds points of other settings or code.
    """
    changes = {key: read_text(value).plain() for key, value in options.items()}
    chosen = {name: changes.pop(f"mixer.{name}") for name in mixer_options(mixers, options)}
    for mixer in mixers:
        load_mixer(mixer)  # refuses what is no mixer, before any is trained
    found = [find_settings(task, size, changes) for task in tasks or TASKS]
    plan = [_points(Path(out), settings, mixers, chosen) for settings in found]
    for point in itertools.chain(*plan):
        _kept(point)  # refuses another point, before any is trained
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for settings, points in zip(found, plan, strict=True):
        say(f"{settings.task}, {size}, {settings.epochs} epochs on {device.type}")
        for point in points:
            with locked(point.path.with_suffix(".lock"), f"another run makes {point.path}: wait for it"):
                _make(point, device)
        say("\n".join(table(collect(points[0].folder))))


def _points(out: Path, settings: Settings, mixers: Sequence[str], options: Mapping[str, Any]) -> list[Point]:
    """The points of a task; their folder is made if needed."""
    folder = out / "recall" / settings.size / settings.task
    check_folder(folder.parents[1], out)
    folder.mkdir(parents=True, exist_ok=True)
    each = itertools.product(mixers, settings.widths)
    return [Point(settings, mixer, titled(mixer, options), width, options, folder) for mixer, width in each]


def _kept(point: Point) -> dict[str, Any]:
    """What the folder has of a point.

    Raises:
        UserError: it is of other settings or code.
    """
    before = _read_point(point.path) if point.path.is_file() else {}
    if before and before["fingerprint"] != point.fingerprint:
        why = difference(before["fingerprint"], point.fingerprint)
        raise UserError(f"{point.path} is another point, {why}: choose another --out, or delete that file")
    return before


def _make(point: Point, device: torch.device) -> None:
    """Train a point unless it is finished."""
    checkpoint = point.path.with_suffix(f".{point.fingerprint}.pt")  # what other settings left is not continued
    if not _kept(point).get("finished"):
        _train(point, device, checkpoint)
    checkpoint.unlink(missing_ok=True)


def _train(point: Point, device: torch.device, checkpoint: Path) -> None:
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
        "state_elements": learners[0].model.state_elements(length),
        "parameters": learners[0].model.n_parameters(),
        "test_length": length,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "versions": {name: version(name) for name in ("seqarch", "torch", "triton")},
        "fingerprint": point.fingerprint,
        "settings": dataclasses.asdict(settings),
    }

    def note(progress: Progress) -> None:
        scores, results = progress.scores, progress._replace(seconds=round(progress.seconds, 1))._asdict()
        results.update(accuracy=scores.accuracy, slices=scores.slices, **scores.measures)
        write_json(point.path, {**facts, **{key: each for key, each in results.items() if key != "scores"}})
        done = f"epoch {progress.epochs}, accuracy {scores.accuracy:.3f} at {progress.rate:g}, {progress.seconds:.0f} s"
        say(f"{point.title} {point.width}: {done}")

    train(settings, learners, testing, checkpoint, note)


def collect(folder: Path) -> list[dict[str, Any]]:
    """All points of a task, by mixer and width; written as the task's file, table and figure too."""
    points = [_read_point(path) for path in sorted(folder.glob("*.json"))]
    points.sort(key=lambda point: (point["mixer"], point["width"]))
    write_json(folder.with_suffix(".json"), {"points": points})
    draw(points, folder)
    return points


def _read_point(path: Path) -> dict[str, Any]:
    point = read_json(path)
    if wrong := [name for name, kind in KINDS.items() if not isinstance(point.get(name, ...), kind)]:
        raise UserError(f"{path} is not a point of a recall exam (see its {', '.join(wrong)}): remove it")
    return point


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
        rows[-1] += [f"{point[name]:.3f}" if name in point else "" for name in measured]
        rows[-1] += [f"{point['slices'][name]:.2f}" if name in point["slices"] else "" for name in slices]
        rows[-1] += [f"{point['rate']:g}", str(point["epochs"]), f"{point['seconds']:.0f}"]
    return markdown(rows)
