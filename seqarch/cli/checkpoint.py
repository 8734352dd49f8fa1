"""`seqarch checkpoint`: lists, checks and merges the checkpoints of a run."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from seqarch.errors import UserError, say
from seqarch.experiment.help import subcommand
from seqarch.runs.folder import checkpoints, is_sharded, named_checkpoint
from seqarch.tables import aligned


def add_arguments(parser: ArgumentParser) -> None:
    commands = parser.add_subcommands(dest="command")
    merge = subcommand(commands, "checkpoint merge", "Make one file of a checkpoint that is a folder.")
    merge.add_argument("--out", type=str | None, help="the file; by default NAME.merged.ckpt next to the folder")
    show = subcommand(commands, "checkpoint show", "List the checkpoints of a run with their sizes.")
    check = subcommand(commands, "checkpoint check", "Compare a checkpoint with its checksums.")
    show.add_argument("run", help="a run folder")
    for each in (merge, check):
        each.add_argument("checkpoint", help="a checkpoint, or a run folder: its newest")


def run(args: Namespace) -> None:
    if args.command == "show":
        say(show(Path(args.show.run)))
        return
    from seqarch.training.checkpoint import merge
    from seqarch.training.integrity import check_checkpoint

    path = named_checkpoint(args[args.command].checkpoint)
    if args.command == "check":
        check_checkpoint(path)
        say(f"{path} is whole")
    else:
        say(f"wrote {merge(path, args.merge.out and Path(args.merge.out))}")


def show(run: Path) -> str:
    """A table of the checkpoints of a run: what each is, its bytes, and its folder."""
    if not (found := checkpoints(run)):
        raise UserError(f"{run} has no checkpoints: name a run folder of seqarch fit")
    rows = [["checkpoint", "form", "MiB"]]
    for path in found:
        parts = [*path.iterdir()] if is_sharded(path) else [path]
        form = f"folder of {len(parts) - 1}" if is_sharded(path) else "file"
        rows.append([str(path), form, f"{sum(part.stat().st_size for part in parts) / 2**20:,.1f}"])
    return "\n".join(aligned(rows))
