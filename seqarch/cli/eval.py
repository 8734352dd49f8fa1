"""`seqarch eval`: its arguments, and its results as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from jsonargparse import ArgumentParser, Namespace

from seqarch.arguments import Count, Interval
from seqarch.errors import UserError, absent, say
from seqarch.plugins import ALLOW_CODE, FLAG
from seqarch.tables import aligned

if TYPE_CHECKING:
    from seqarch.evaluation import Task
    from seqarch.runs.results import Result, Value

Length = Annotated[int, Interval(1, 2**30, "[]")]
"""One of `--lengths`: the tokens of a prompt are in memory."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", default=[], help="tasks, groups of tasks (few_shot, retrieval) or all")
    parser.add_argument("--list", action="store_true", help="list the tasks with their rows, or how to get them")
    parser.add_argument("--limit", type=Count | None, help="take only the first samples of each task")
    parser.add_argument("--lengths", type=Length, nargs="+", help="tokens of prompts (passkey), ends of ranges (long)")
    parser.add_argument("--rows", type=str | None, help="folder with rows, such as fda.jsonl")
    scoring = parser.add_argument_group("without --list")
    scoring.add_argument("--checkpoint", type=str | None, help="a checkpoint, or a run folder: its newest")
    scoring.add_argument("--data_root", type=str | None, help="where the run's data are now; by default as in training")
    scoring.add_argument("--out", type=str | None, help="folder of results; by default the run folder")
    scoring.add_argument("--precision", type=str | None, help="precision; by default as in training")
    scoring.add_argument("--prefix", type=Literal["eos", "none"], default="eos", help="what stands before every prompt")
    scoring.add_argument("--batch_tokens", type=Count | None, help="tokens per forward pass")
    scoring.add_argument(FLAG, action="append", default=[], help=ALLOW_CODE)


def run(args: Namespace) -> None:
    if args.rows and not Path(args.rows).is_dir():
        raise absent("folder", args.rows, "--rows names one with files such as fda.jsonl")
    if args.checkpoint is None and not args.list:
        raise UserError("missing --checkpoint, a checkpoint of a run (or --list, to see the tasks)")
    from seqarch.evaluation import Asked
    from seqarch.evaluation.registry import check_asked, every_task, tasks_named, with_rows
    from seqarch.experiment.evaluate import evaluate_checkpoint

    asked = Asked(args.limit, tuple(args.lengths) if args.lengths else None, args.rows and str(Path(args.rows)))
    if args.list:
        tasks = tasks_named(args.tasks, asked) if args.tasks else every_task(asked)
        say("\n".join(aligned(_task_rows(tasks))))
        return
    check_asked(asked, tasks_named(args.tasks, asked))
    results = evaluate_checkpoint(
        str(args.checkpoint),
        with_rows(args.tasks, asked),
        args.out,
        precision=args.precision,
        prefix=args.prefix == "eos",
        batch_tokens=args.batch_tokens,
        verbose=True,
        data_root=args.data_root,
        allow_code=args.allow_code,
    )
    say("\n".join(aligned(_result_rows(results) + _average_row(results))))
    say(f"results in {results[0].path.parent}")


def _task_rows(tasks: "Sequence[Task]") -> list[list[str]]:
    rows = [["group", "task", "rows"]]
    for task in tasks:
        try:
            found = task.row_files()
            where = found.where if found else "made by the task" if not task.reads_data else "the data of the run"
        except UserError as error:
            where = f"missing: {error}"
        rows.append([task.group, task.name, where])
    return rows


def _result_rows(results: "Sequence[Result]") -> list[list[str]]:
    rows = [["metric", "value", "95 % interval", "chance", "samples"]]
    for result in results:
        limited = " (--limit)" if result.content["settings"].get("limit") else ""
        limited += f", {cut} of them cut" if (cut := result.content.get("cut")) else ""
        for tag, one in result.metrics.items():
            rows.append([tag, *_value_cells(one), f"{one.n}{limited}" if one.n else ""])
    return rows


def _value_cells(one: "Value") -> tuple[str, str, str]:
    """The value, its interval and the value of a guess."""
    between = "" if one.low is None or one.high is None else f"{one.low:.4g} to {one.high:.4g}"
    chance = "" if one.chance is None else f"{one.chance:.4g}{', at chance' if one.at_chance else ''}"
    return f"{one.value:.4g}", between, chance


def _average_row(results: "Sequence[Result]") -> list[list[str]]:
    """The average over few-shot tasks, if there are some."""
    from seqarch.runs.few_shot import average, title

    metrics = {tag: value for result in results for tag, value in result.metrics.items()}
    mean = average(metrics)
    return [[title(metrics), *_value_cells(mean), str(mean.n)]] if mean else []
