"""The parser of recipes: an option for each argument of the trainer, the model, the data and the callbacks."""

import functools
import json
from argparse import SUPPRESS
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace  # pyright: ignore[reportPrivateImportUsage]
from lightning.pytorch import Trainer

import seqarch
from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError
from seqarch.evaluation.registry import import_tasks
from seqarch.experiment.checker import checked
from seqarch.experiment.recipes import expand_recipes
from seqarch.mixers.registry import import_parts
from seqarch.plugins import ALLOW_CODE, FLAG
from seqarch.training import LanguageModel
from seqarch.training.callbacks import CALLBACKS

TRAINER_DEFAULTS = {
    "gradient_clip_val": 1.0,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "enable_model_summary": False,
}


@functools.cache
def recipe_parser() -> ArgumentParser:
    """Return the parser of recipes that are not given on a command line, made once for a process."""
    return build_parser("seqarch")


def build_parser(prog: str, usage: str | None = None, description: str | None = None) -> ArgumentParser:
    """Return a new parser. All plug-ins are imported, so that a recipe may name their bare classes."""
    import_parts()
    import_tasks()
    header = [f"seqarch=={seqarch.__version__}"]
    parser = ArgumentParser(prog=prog, usage=usage, description=description, exit_on_error=False, dump_header=header)
    parser.add_argument("-c", "--config", action=ActionConfigFile, help="recipe: a file, or the name of a bundled one")
    parser.add_argument("--seed_everything", type=int, default=0, help="seed of initial weights and data order")
    parser.add_class_arguments(Trainer, "trainer", instantiate=False, fail_untyped=False)
    parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})
    parser.add_class_arguments(LanguageModel, "model", fail_untyped=False)
    parser.add_class_arguments(TextDataModule, "data", fail_untyped=False)
    parser.add_argument("--extends", type=str | None, help=SUPPRESS)  # recipes use it
    parser.add_argument(FLAG, type=str, default="", help=ALLOW_CODE)  # removed from the command line before
    parser.add_argument("--run_dir", type=str | None, help="folder that the run is written to")
    for key, callback in CALLBACKS.items():
        parser.add_class_arguments(callback, key, fail_untyped=False)
    parser.add_argument("--ckpt_path", type=str | None, help="checkpoint to resume from, or to measure")
    return parser


def parse_args(
    parser: ArgumentParser,
    args: Sequence[str],
    recipe: Mapping[str, Any] | None = None,
    allow_code: Collection[str] = (),
) -> Namespace:
    """Parse a command line with recipes in it.

    Args:
        parser: `recipe_parser`.
        args: the command line.
        recipe: a recipe that the command line is laid over, as a file would hold it; its `extends` names another.
        allow_code: packages whose classes may be named, next to those of seqarch and plug-ins.

    Raises:
        UserError: what is wrong in the command line or in a recipe.
    """
    content = dict(recipe or {})
    base = content.pop("extends", None)
    files = expand_recipes(["--config", str(base)] if base else [])
    try:
        given = ["--config", yaml.safe_dump(content, sort_keys=False)] if content else []
    except yaml.YAMLError as error:
        raise UserError(f"the recipe holds {error.args[-1]!r}: expected plain values, as in a file") from error
    args = [*files, *given, *expand_recipes(list(args))]
    parsed = checked(parser, args, allow_code)
    if parsed.allow_code:
        raise UserError(f"allow_code belongs on the command line only: {FLAG} {parsed.allow_code}")
    return parsed


def plain(parser: ArgumentParser, parsed: Namespace) -> dict[str, Any]:
    """The parsed options as mappings, lists and scalars, as in `config.yaml`."""
    text = parser.dump(parsed, "json", skip_unset=False, skip_validation=True, skip_link_targets=False)
    config = json.loads(text)
    for key in ("extends", "allow_code"):  # extends is resolved by now, allow_code is never in a file
        config.pop(key, None)
    return config
