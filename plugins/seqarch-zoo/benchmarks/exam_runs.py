"""The runs of the README's exam, each by itself, so that several may share a GPU.

    python plugins/seqarch-zoo/benchmarks/exam_runs.py recipes runs/exam/small SHARDS [--set KEY=VALUE ...]
    python plugins/seqarch-zoo/benchmarks/exam_runs.py run runs/exam/small MLSTM 0

The first command writes `NAME/recipe.yaml` for the reference and each model of `MODELS`: the recipe that `seqarch exam`
would follow. `--set` sets a key for all of them, after `SETTINGS`. The second command trains one seed of a model, or
resumes it, and removes its checkpoints at the end. `benchmarks/budget_tables.py` compares what is in the folder.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

import yaml

from seqarch.exam.models import find_model, load_size
from seqarch.exam.records import minutes_used
from seqarch.exam.work import fit
from seqarch.runs.layout import CHECKPOINTS, TENSORBOARD, branches
from seqarch.runs.record import is_finished, write_note

REFERENCE = "transformer_pp"
FLA: dict[str, dict[str, str]] = {
    "ForgettingAttention": {"options": "{num_heads: 8}"},  # by default 32 heads of 16 channels at this width
    "GatedLinearAttention": {},
    "GatedLinearAttention-short_conv": {"options": "{use_short_conv: true}"},
    "HGRN2Attention": {},
}
"""By the name of its folder after `FlaLayer-`, which begins with the layer's: the options that it is given."""
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    REFERENCE: (REFERENCE, {}),
    **{
        name: (name, {})
        for name in (
            *("GatedAssociative", "GatedAttention", "TTTLinear", "MLSTM", "DLR", "S4D"),
            *("KimiDeltaAttention", "MesaNet", "Mamba3"),
        )
    },
    **{f"FlaLayer-{name}": ("FlaLayer", {"layer": name.partition("-")[0], **options}) for name, options in FLA.items()},
}
"""By the name of its folder: the word for `seqarch exam --mixer`, and the options of the mixer."""
SETTINGS = {"trainer.max_steps": "2595", "branches.at": "[0.25, 0.5]", "model.learning_rate": "2.25e-3"}
"""Half of the tokens of size `small` for each model, and the rate that the reference's ladder chose there."""


def write_recipes(folder: Path, size: str, shards: str, settings: dict[str, str]) -> None:
    for name, (word, options) in MODELS.items():
        _, recipe = find_model(load_size(size, settings), word, options)
        recipe["data"]["root"] = shards
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


def train(folder: Path, name: str, seed: int) -> str:
    """Train a seed of a model in `folder/name/seed_<seed>`; "" or what went wrong."""
    run = folder / name / f"seed_{seed}"
    if not is_finished(run):
        start = time.time() - 60 * minutes_used(run)
        write_note(run, start=start)
        args = [f"--config={folder / name / 'recipe.yaml'}", f"--seed_everything={seed}", f"--run_dir={run}"]
        wrong = fit([*args, "--trainer.enable_progress_bar=false"])
        write_note(run, minutes=round((time.time() - start) / 60, 3), start=None)
        if wrong or not is_finished(run):
            return wrong or "it stopped before its last step; the same command resumes it"
    for each in (run, *branches(run)):
        shutil.rmtree(each / CHECKPOINTS, ignore_errors=True)
        shutil.rmtree(each / TENSORBOARD, ignore_errors=True)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    recipes = commands.add_parser("recipes")
    recipes.add_argument("folder", type=Path)
    recipes.add_argument("shards", help="folder of shards, or embedded")
    recipes.add_argument("--size", default="small")
    recipes.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="settings")
    run = commands.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("name", choices=MODELS)
    run.add_argument("seed", type=int)
    args = parser.parse_args()
    if args.command == "run":
        sys.exit(train(args.folder, args.name, args.seed) or 0)
    given = dict(each.split("=", 1) for each in args.settings)
    write_recipes(args.folder, args.size, args.shards, SETTINGS | given)


if __name__ == "__main__":
    main()
