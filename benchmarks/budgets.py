"""Finished models at several budgets, each architecture at its own best learning rate.

    python benchmarks/budgets.py transformer_pp rwkv7 --data shards --out runs/budgets

Each rate of the ladder is a run of `seqarch fit` with branches, stopped when its shortest branch is finished. The rate
whose branch has the lowest loss on the in-domain hold-out goes on to the end; no OOD loss is looked at. The ladder gets
another rate while the best lies at an end. The same command goes on with what was interrupted.

OUT/<model>/recipe.yaml                               what its runs follow
OUT/<model>/rate_<rate>/                              a run folder
OUT/<model>/rate_<rate>/branches/step_<steps>/        finished models of fewer steps
OUT/<model>/ladder.json                               the in-domain loss of each rate, and which went on
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import yaml
from seqarch.cli.exam_models import find_model, load_size, with_root

from seqarch.cli.training import TrainingCLI
from seqarch.report.runs import load_run
from seqarch.runs.files import write_json, write_text
from seqarch.runs.layout import branches

FACTORS = (2 / 3, 1.0, 1.5, 2.2, 3.3, 5.0)
"""Rates of the ladder, as multiples of the size's; the first that are tried are those from the second to the fourth."""


class Whole(TrainingCLI):
    """`seqarch fit` without figures."""

    def after_fit(self) -> None: ...


class UntilFirstBranch(Whole):
    """The same, ended when the first branch is finished."""

    def _finish_branches(self) -> None:
        super()._finish_branches()
        if self.run_dir is not None and branches(self.run_dir):
            sys.exit(0)


def fit(kind: type[TrainingCLI], recipe: Path, run: Path, rate: float) -> None:
    """Train one run in this process."""
    torch._dynamo.reset()  # compiled code of the run before counts against the limit of recompilations
    try:
        kind(["fit", f"--config={recipe}", f"--run_dir={run}", f"--model.learning_rate={rate:g}"])
    except SystemExit as stop:
        if stop.code:
            raise
    torch.cuda.empty_cache()


def climb(recipe: Path, folder: Path, base: float) -> dict[float, float]:
    """The in-domain loss of the shortest branch at each rate of the ladder."""
    losses: dict[float, float] = {}
    tried = list(FACTORS[1:4])
    while tried:
        factor = tried.pop(0)
        run = folder / f"rate_{factor * base:.2e}"
        fit(UntilFirstBranch, recipe, run, factor * base)
        losses[factor] = float(load_run(branches(run)[0]).evaluations.in_domain[-1])
        write_json(folder / "ladder.json", {f"{each * base:.2e}": loss for each, loss in losses.items()})
        if not tried:
            best, at = min(losses, key=losses.__getitem__), sorted(losses)
            beyond = {at[0]: FACTORS.index(at[0]) - 1, at[-1]: FACTORS.index(at[-1]) + 1}.get(best, -1)
            tried = [FACTORS[beyond]] if 0 <= beyond < len(FACTORS) else []
    return {factor * base: loss for factor, loss in losses.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="mixers or recipes, as `seqarch exam --mixer` takes them")
    parser.add_argument("--size", default="small")
    parser.add_argument("--data", required=True, help="folder of shards")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other keys of the size's recipe")
    parser.add_argument("--best", type=int, default=1, help="how many of the best rates go on to the end")
    args = parser.parse_args()
    size = load_size(args.size, dict(each.split("=", 1) for each in args.set))
    for model in args.models:
        name, recipe = find_model(size, model, {})
        folder = args.out / name
        write_text(folder / "recipe.yaml", yaml.safe_dump(with_root(recipe, args.data), sort_keys=False))
        losses = climb(folder / "recipe.yaml", folder, recipe["model"]["learning_rate"])
        for rate in sorted(losses, key=losses.__getitem__)[: args.best]:
            print(f"{name}: goes on at {rate:.2e}; in-domain loss of the ladder {json.dumps(losses)}", flush=True)
            fit(Whole, folder / "recipe.yaml", folder / f"rate_{rate:.2e}", rate)


if __name__ == "__main__":
    main()
