"""`seqarch scale` from beginning to end."""

from collections.abc import Sequence
from pathlib import Path

from seqarch.errors import UserError, say
from seqarch.runs.tags import IN_DOMAIN
from seqarch.scale.decisions import PREDICTIONS, ends_of, register
from seqarch.scale.losses import GAP, LOSS, Point, read_losses, read_runs
from seqarch.scale.request import Request
from seqarch.scale.summary import Summary


def train(request: Request, loss: str | None) -> None:
    """Train the rungs and print their summary. After each rung, what it predicts for the next is written down.

    Raises:
        UserError: what is wrong, before anything is trained; or which runs failed, after the others are summarised.
    """
    from seqarch.exam.train import check_all_finished
    from seqarch.scale.rungs import train_rungs

    loss = loss or IN_DOMAIN
    if loss == GAP and request.match != "tokens":
        raise UserError("--loss gap compares models with the same tokens: set --match tokens")
    out = Path(request.out or "runs/scale")
    folders: list[Path] = []
    wrong: dict[str, str] = {}
    points: list[Point] = []
    reference = ""
    for exam, failed, following in train_rungs(request, out):
        wrong |= failed
        reference = exam.reference.name
        folders += [run for entrant in exam.entrants for run in exam.finished(entrant)]
        points = read_runs(folders, loss, reference)
        known = {each.name for each in following.entrants if following.finished(each)} if following else ()
        register(out / PREDICTIONS, loss, ends_of(points), known)
    say("\n" + _write(Summary(points, loss, reference, out / PREDICTIONS), out))
    check_all_finished(wrong)


def summarize(
    runs: Sequence[Path], losses: Path | None, loss: str | None, reference: str | None, out: Path | None
) -> str:
    """The summary of run folders or of a CSV file, written to `out` if that is given.

    Raises:
        UserError: as `read_runs`, `read_losses` and `Summary`.
    """
    points = read_losses(losses, loss) if losses else read_runs(runs, loss or IN_DOMAIN, reference)
    loss = loss or (LOSS if losses else IN_DOMAIN)
    summary = Summary(points, loss, reference, out and out / PREDICTIONS)
    return _write(summary, out) if out else summary.text


def _write(summary: Summary, out: Path) -> str:
    text = summary.text  # scores the predictions before new ones are written
    return "\n".join([text, "", *(f"wrote {path}" for path in summary.write(out))])
