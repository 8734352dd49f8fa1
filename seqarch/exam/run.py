"""An exam from beginning to end: check every model, train, judge, print the verdicts."""

import sys

from seqarch.errors import UserError, say
from seqarch.exam.plan import Request, make_plan
from seqarch.exam.pool import Pool, share_gpus
from seqarch.exam.train import train
from seqarch.exam.verdict import compared, judge, verdict_text
from seqarch.report import Comparison


def run_exam(request: Request) -> None:
    """Make the exam and print the verdicts.

    Raises:
        UserError: what is wrong, before anything is trained; or which runs failed, after the others are judged.
    """
    exam = make_plan(request)
    gpus = share_gpus(exam.reference.recipe["trainer"], request.workers)
    for entrant in exam.entrants:
        share = "no known decoding state" if (part := entrant.state_share) is None else f"state {part:.1%} of the cache"
        say(f"{entrant.name}: {entrant.parameters:,} parameters, {share}")
    try:
        with Pool(gpus) as pool:
            exam, failed = train(exam, pool, progress=sys.stdout.isatty() and len(gpus) == 1)
    except KeyboardInterrupt:
        say("stopped; the same command resumes from the last checkpoint")
        raise
    findings = compared(exam)
    for verdict in [judge(exam, candidate, failed, findings) for candidate in exam.candidates]:
        figures = ", index.html, scatter.png" if verdict.compared else ""
        say(f"\n{verdict_text(verdict)}\n\nwrote {verdict.folder}/verdict.md, verdict.json{figures}")
    if findings is not None and len(findings.groups) > 2:
        names = [entrant.name for entrant in exam.entrants]
        page, *_ = Comparison(findings.only(names)).write(exam.folder / "report")
        say(f"\nall models together: {page}")
    if failed:
        first, why = next(iter(failed.items()))
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise UserError(f"{first}{more} not finished ({why}); the same command makes the missing runs")
