"""`seqarch mixers`: its arguments, and the list of mixers, which imports none of them."""

import ast
import json
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from seqarch.cli.new_mixer import new_mixer
from seqarch.errors import UserError, check_known, say
from seqarch.plugins import MIXERS, entries, name_and_version
from seqarch.tables import listed

NEW = "new"


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = (
        "seqarch mixers [NAME ...] [--json] [--costs [--d_model WIDTH]]\n       seqarch mixers new NAME [--out FOLDER]"
    )
    names = "mixers to show with their options; `new NAME` writes a package with a mixer of your own"
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help=names)
    shown = parser.add_argument_group(f"without {NEW}")
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.add_argument("--costs", action="store_true", help="print the costs and abilities of each mixer, by device")
    costs = parser.add_argument_group("with --costs")
    costs.add_argument("--d_model", type=int, default=768, help="width at which the mixers are built")
    new = parser.add_argument_group(f"with {NEW}")
    new.add_argument("--out", type=str | None, help="the package's folder; by default running-mean")


def run(args: Namespace) -> None:
    if args.names[:1] == [NEW]:
        _new(args)
        return
    known = entries(MIXERS)
    for name in args.names:
        check_known("mixer", name, (*known, NEW))
    if not (args.names or args.json or args.costs):
        say(mixer_list())
        return
    from seqarch.cli import mixers  # which imports PyTorch

    if args.json:
        rows = mixers.mixer_costs(args.d_model, args.names) if args.costs else mixers.describe_mixers(args.names)
        # a default that JSON cannot hold is given as text
        print(json.dumps(rows, indent=2, default=str))  # noqa: T201 - JSON escapes
    else:
        say(mixers.cost_table(args.d_model, args.names) if args.costs else mixers.mixer_pages(args.names))


def _new(args: Namespace) -> None:
    if len(args.names) != 2:
        raise UserError("seqarch mixers new takes one name: write it as in seqarch mixers new RunningMean")
    written = new_mixer(args.names[1], args.out and Path(args.out))
    say("\n".join(f"wrote {path}" for path in written))
    say(f"next: cd {written[0].parent}; pip install -e '.[test]'; python -m pytest")


def mixer_list() -> str:
    """Each mixer with its package, unless that is seqarch, and the summary of its class."""
    points = entries(MIXERS)
    words = {}
    for name, point in points.items():
        package, version = name_and_version(point.dist)
        words[name] = f"{summary(point)} {'' if package == 'seqarch' else f'({package} {version})'}".strip()
    return f"{listed(words)}\n\n`seqarch mixers NAME` shows one with its options."


def summary(point: EntryPoint) -> str:
    """The first paragraph of a declared class's docstring, read from its source: to import it takes seconds.

    Empty where it cannot be read.
    """
    try:
        top, *inner = point.module.split(".")
        spec, path = find_spec(top), top
        for part in inner:
            path = f"{path}.{part}"
            spec = spec and PathFinder.find_spec(path, spec.submodule_search_locations)
        tree = ast.parse(Path((spec and spec.origin) or "").read_bytes())
    except (AttributeError, ImportError, OSError, SyntaxError, ValueError):  # the first if it names no module
        return ""
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == point.attr]
    return " ".join((ast.get_docstring(found[0]) or "").split("\n\n")[0].split()) if found else ""
