"""`seqarch export` and `seqarch import`: to folders of Hugging Face's transformers, and from them."""

from jsonargparse import ArgumentParser, Namespace

from seqarch.errors import UserError, check_package, say
from seqarch.plugins import ALLOW_CODE, FLAG


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a checkpoint, or a run folder: its newest")
    parser.add_argument("--out", required=True, help="the folder, new; with --weights a new file NAME.safetensors")
    parser.add_argument("--weights", action="store_true", help="write only the weights, for seqarch.load")
    folder = parser.add_argument_group("without --weights")
    folder.add_argument("--as", type=str | None, help="a published family, in whose own names the folder is written")
    folder.add_argument(FLAG, action="append", default=[], help=ALLOW_CODE)


def add_import_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", help="folder with config.json, the weights and the tokenizer")
    parser.add_argument("--out", required=True, help="the run folder, new")
    parser.add_argument("--tokenizer", type=str | None, help="as of `seqarch data prepare`; by default the folder's")
    parser.add_argument("--eos_token", type=str | None, help="token that ends a document, if the tokenizer names none")
    parser.add_argument("--bos_token", type=str | None, help="token that begins a document; '' for none")
    parser.add_argument("--data", type=str | None, help="folder of shards that `seqarch eval` measures losses on")
    data = parser.add_argument_group("with --data")
    data.add_argument("--train", nargs="+", default=[], help="its domains that count as in-domain")
    data.add_argument("--ood", nargs="+", default=[], help="its other domains")
    length = "tokens of a sequence of these data; by default the model's own length, at most 1024"
    data.add_argument("--sequence_length", type=int | None, help=length)


def run_import(args: Namespace) -> None:
    check_package("transformers", "`seqarch import`", "'seqarch[hf]'")
    from seqarch.hf.imports import import_model

    options = dict(vars(args))
    root, train, ood, length = (options.pop(name) for name in ("data", "train", "ood", "sequence_length"))
    if root and not train:
        raise UserError("--data needs --train: at least one of its domains")
    data = {"root": root, "train": dict.fromkeys(train, 1.0), "ood": ood, "sequence_length": length}
    say(f"wrote {import_model(**options, data=data if root else None)}")


def run(args: Namespace) -> None:
    if args.weights:
        from seqarch.training.checkpoint import export_weights

        say(f"wrote {export_weights(args.checkpoint, args.out)}")
    else:
        check_package("transformers", "`seqarch export`", "'seqarch[hf]'")
        from seqarch.hf.export import export

        say(f"wrote {export(args.checkpoint, args.out, args.allow_code, family=args['as'])}")
