"""`seqarch scale`: its arguments."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from seqarch.errors import UserError, say
from seqarch.plugins import ALLOW_CODE, FLAG
from seqarch.scale.request import Request


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", default=[], help="run folders to read, of several sizes or budgets")
    parser.add_argument("--losses", type=str | None, help="a CSV file to read instead: model, parameters, tokens, loss")
    parser.add_argument(
        "--mixer", action="extend", nargs="+", default=[], help="models to train, as for `seqarch exam`"
    )
    parser.add_argument(
        "--loss",
        type=str | None,
        help="in_domain (default), ood, a domain, or gap, the gap at equal in-domain loss; in a CSV file a column",
    )
    parser.add_argument(
        "--out",
        type=str | None,
        help="folder of the rungs and the summary, by default runs/scale; without --mixer none",
    )
    read = parser.add_argument_group("without --mixer")
    read.add_argument(
        "--reference", type=str | None, help="the model of runs that others are compared with; by default the first"
    )
    training = parser.add_argument_group("with --mixer")
    training.add_argument(
        "--sizes", nargs="+", default=[], help="parameters of the reference at each rung, such as 10M"
    )
    training.add_class_arguments(Request, as_group=False, skip={"mixers", "sizes", "allow_code", "options", "out"})
    training.add_argument(FLAG, action="append", default=[], help=ALLOW_CODE)


def run(args: Namespace) -> None:
    if sum(map(bool, (args.mixer, args.losses, args.runs))) != 1:
        raise UserError("name either --mixer M... to train, or run folders, or --losses FILE.csv")
    from seqarch.scale.summary import summarize, train

    options = dict(vars(args))
    runs, losses, loss, reference = (options.pop(key) for key in ("runs", "losses", "loss", "reference"))
    if args.mixer:
        train(Request(options.pop("mixer"), **options), loss)
    else:
        if args.options:
            raise UserError(f"--{next(iter(args.options))} is for training: name models with --mixer")
        out = Path(args.out) if args.out else None
        say(summarize([Path(run) for run in runs], losses and Path(losses), loss, reference, out))
