"""The parser of recipes: an option for each argument of the trainer, the model, the data and the callbacks."""

import functools
import json
from argparse import SUPPRESS
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace  # pyright: ignore[reportPrivateImportUsage]
from jsonargparse.typing import register_type
from lightning.pytorch import Trainer

import seqarch
from seqarch.arguments import Seed, Steps
from seqarch.data.datamodule import TextDataModule
from seqarch.evaluation.registry import import_tasks
from seqarch.experiment.checker import HELP, check_words, parse_tree
from seqarch.experiment.checks import check_destinations
from seqarch.experiment.help import Parser
from seqarch.experiment.recipes import PRINT, compose
from seqarch.experiment.tree import at
from seqarch.mixers.registry import import_parts
from seqarch.plugins import ALLOW_CODE, FLAG, trust
from seqarch.training import LanguageModel
from seqarch.training.callbacks import CALLBACKS

FROM = "--from"
IN_HELP = ("max_steps", "accelerator", "devices", "precision")
"""The options of the trainer that `--help` shows."""
TRAINER_DEFAULTS = {
    "gradient_clip_val": 1.0,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "enable_model_summary": False,
}

DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
"""The types of tensors by their names in a recipe, such as `torch.float32`."""
register_type(torch.dtype, deserializer=DTYPES.__getitem__, deserializer_exceptions=KeyError)


@functools.cache
def recipe_parser() -> ArgumentParser:
    """Return the parser of recipes that are not given on a command line, made once for a process."""
    return build_parser("seqarch")


def build_parser(prog: str, usage: str | None = None, description: str | None = None) -> ArgumentParser:
    """Return a new parser. All plug-ins are imported, so that a recipe may name their bare classes."""
    import_parts()
    import_tasks()
    header = [f"seqarch=={seqarch.__version__}"]
    parser = Parser(prog=prog, usage=usage, description=description, dump_header=header)
    all_of_them = "show this message with all options of Lightning's trainer and exit"
    parser.add_argument("--help_all", action="help", dest="help", help=all_of_them)
    parser.add_argument("-c", "--config", action=ActionConfigFile, help="recipe: a file, or the name of a bundled one")
    parser.add_argument("--seed_everything", type=Seed, default=0, help="seed of initial weights and data order")
    parser.add_class_arguments(LanguageModel, "model", fail_untyped=False)
    parser.add_class_arguments(TextDataModule, "data", fail_untyped=False)
    parser.add_argument(FLAG, type=str, default="", help=ALLOW_CODE)  # removed from the command line before
    parser.add_argument("--run_dir", type=str | None, help="folder that the run is written to")
    parser.add_argument("--profile", type=Steps, default=0, help="steps to record: a trace in RUN/profile, and a table")
    for key, callback in CALLBACKS.items():
        parser.add_class_arguments(callback, key, fail_untyped=False)
    parser.add_class_arguments(Trainer, "trainer", instantiate=False, fail_untyped=False)
    parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})
    parser.add_argument(
        FROM, type=str | None, help="run or checkpoint to go on from, with its recipe, its optimizer and unseen text"
    )
    parser.add_argument("--ckpt_path", type=str | None, help="checkpoint to resume from, or to measure")
    for group in parser._action_groups[2:]:  # after the positional arguments and the options without a section
        group.title, group.description = group._group_actions[0].dest, f"{group.title}."
    return parser


def read_options(
    parser: ArgumentParser,
    args: Sequence[str] = (),
    recipe: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    allow_code: Collection[str] = (),
) -> Namespace:
    """The options of a command line with recipes in it, of a recipe as a mapping, and of overrides.

    Args:
        parser: `recipe_parser`.
        args: as of `compose`, as are `recipe` and `overrides`.
        recipe: what the command line is laid over.
        overrides: what is laid over the command line.
        allow_code: packages whose classes may be named, next to those of seqarch and plug-ins.

    Raises:
        UserError: what is wrong in one of them.
        SystemExit: after `--help` or `--print_config`.
    """
    if helps := [at for at, word in enumerate(args) if word in HELP or word.partition("=")[0].endswith(".help")]:
        trust(allow_code)
        _show_help(parser, args[helps[0] : helps[0] + 2])
    tree, words = compose(parser, args, recipe, overrides)
    check_words(parser, words)
    options = parse_tree(parser, tree, allow_code)
    check_destinations(options.trainer, at(tree, ["trainer"]))
    if printed := [word for word in args if word.partition("=")[0] == PRINT]:
        parser.parse_args([printed[0]], namespace=options)
    return options


def _show_help(parser: ArgumentParser, args: Sequence[str]) -> None:
    """Answer `--help`, or the `.help` of an option. `--help` shows a few options of the trainer."""
    hidden = [action for action in parser._actions if action.dest.startswith("trainer") and args[0] in ("-h", "--help")]
    texts = {action: action.help for action in hidden if action.dest.removeprefix("trainer.") not in IN_HELP}
    for action in texts:
        action.help = SUPPRESS
    try:
        parser.parse_args(args)
    finally:
        for action, text in texts.items():
            action.help = text


def plain(parser: ArgumentParser, parsed: Namespace) -> dict[str, Any]:
    """The parsed options as mappings, lists and scalars, as in `config.yaml`."""
    text = parser.dump(parsed, "json", skip_unset=False, skip_validation=True, skip_link_targets=False)
    config = json.loads(text)
    for key in ("allow_code", "profile"):  # of one command
        config.pop(key, None)
    return config
