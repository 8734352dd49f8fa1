"""`seqarch export`: a checkpoint becomes a folder of Hugging Face's transformers, or a file of weights."""

import importlib.util

from jsonargparse import ArgumentParser, Namespace

from seqarch.errors import UserError, say
from seqarch.plugins import ALLOW_CODE, FLAG


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a checkpoint, or a run folder: its newest")
    parser.add_argument("--out", required=True, help="folder to write; with --weights a file NAME.safetensors")
    parser.add_argument("--weights", action="store_true", help="write only the weights, for seqarch.load")
    parser.add_argument(FLAG, action="append", default=[], help=ALLOW_CODE)


def run(args: Namespace) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise UserError("`seqarch export` needs the package transformers: pip install 'seqarch[hf]'")
    from seqarch.hf.export import export, export_weights

    if args.weights:
        say(f"wrote {export_weights(args.checkpoint, args.out)}")
    else:
        say(f"wrote {export(args.checkpoint, args.out, args.allow_code)}")
