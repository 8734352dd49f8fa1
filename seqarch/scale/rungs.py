"""Trains the rungs: some models at several sizes with the same compute, each size an exam without a verdict.

OUT/<rung>/<name>/seed_<n>/    a run folder; a rung is named after the parameters of the reference

**Sizes.** A rung has the width at which Transformer++ comes nearest to the size; its shape, and the models around the
mixers, follow `seqarch.exam.derive`. Text, sequence length and tokens per step are the same at all rungs.

**Compute.** The reference trains some tokens per parameter. Each other model of the rung takes as many steps as have
the same floating-point operations, as the models count them. Branches finish at a quarter and at half of that.

**Learning rates.** Each model climbs a ladder at the smallest rung. Larger rungs have its best rate times
(N / N_smallest)^(-1/3), with N parameters without the embedding. That is the rule of OLMo's model ladder (arXiv
2412.04403), after Porian et al. 2024 (arXiv 2406.19146). Where width and depth grow together, it is one over the
width. With `model.base_width` the rate stays as it is (`seqarch.model.transfer`). The warm-up takes a twentieth of the
steps.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from seqarch.errors import UserError, say
from seqarch.exam.derive import Size, find_models, load_size, measure, shape_of
from seqarch.exam.plan import Entrant, Exam
from seqarch.exam.pool import Pool, share_gpus
from seqarch.exam.request import Models
from seqarch.exam.request import Request as ExamRequest
from seqarch.exam.run import plan_of
from seqarch.exam.train import check_all_finished, train
from seqarch.scale.request import Request
from seqarch.tables import readable

BRANCHES = [0.25, 0.5]
WARM_UP = 0.05
SIZES = {"tiny": ("0.05M", "0.1M", "0.2M"), "small": ("10M", "20M", "42M", "110M")}
"""The rungs' parameters by default, by the exam's size that they take text and training from."""
UNITS = {"k": 1e3, "M": 1e6, "B": 1e9}
WIDEST = 8192
CHOSEN = ("model.d_model", "model.n_layers", "trainer.max_steps", "branches.", "ood_loss.at")
"""Keys that a rung sets."""


def train_rungs(request: Request, out: Path) -> Iterator[tuple[Exam, dict[str, str], Exam | None]]:
    """Make the runs that are missing, rung by rung.

    Yields each rung as an exam, what went wrong by run folder, and the next rung before its runs are made.

    Raises:
        UserError: what is wrong, before anything is trained at that rung; or a model has no learning rate.
    """
    if chosen := [key for key in request.options if key.startswith(CHOSEN)]:
        raise UserError(f"--{chosen[0]}: each rung sets this: choose --sizes and --tokens_per_parameter")
    wanted = wanted_sizes(request)
    base = load_size(request.like, request.options)
    sizes = [rung_size(base, parameters) for parameters in wanted]
    if len({size.model["d_model"] for size in sizes}) < len(sizes):
        raise UserError("two of the --sizes lead to the same width: choose sizes further apart")
    exam = _plan(request, out, sizes[0], base)
    gpus = share_gpus(base.recipe["trainer"], request.workers, len(exam.entrants) * exam.seeds)
    smallest: Exam | None = None
    with Pool(gpus) as pool:
        for size in [*sizes[1:], None]:
            for entrant in exam.entrants:
                tokens = readable(_tokens_per_step(entrant.recipe) * entrant.recipe["trainer"]["max_steps"])
                say(f"rung {exam.size}, {entrant.name}: {entrant.parameters:,} parameters, {tokens} tokens")
            exam, failed = train(exam, pool)
            if exam.ladder and len(exam.rungs) < len(exam.entrants):
                check_all_finished(failed)
            smallest = smallest or exam
            following = _plan(request, out, size, smallest) if size else None
            yield exam, failed, following
            exam = following or exam


def rung_size(base: Size, parameters: float) -> Size:
    """The size whose Transformer++ comes nearest to some parameters, with the text and training of `base`."""
    head = base.model["d_model"] // base.shape.n_heads
    (attention,) = base.model["mixers"]

    def at(heads: int) -> Size:
        recipe, width = copy.deepcopy(dict(base.recipe)), heads * head
        recipe["model"] |= {"d_model": width, "n_layers": shape_of(width).n_layers}
        recipe["model"]["mixers"][attention]["init_args"]["n_heads"] = heads
        return Size(recipe)

    def estimate(heads: int) -> float:
        width = heads * head
        return width * (base.model["vocab_size"] + 12 * shape_of(width).n_layers * width)

    near = min(range(1, WIDEST // head), key=lambda heads: abs(math.log(estimate(heads) / parameters)))
    exact = [at(heads) for heads in range(max(near - 1, 1), near + 2)]
    return min(exact, key=lambda size: abs(math.log(_parameters(size) / parameters)))


def _parameters(size: Size) -> int:
    return measure("the reference", size.recipe).parameters


def wanted_sizes(request: Request) -> list[float]:
    """The parameters of the rungs, in order."""
    sizes = []
    for text in request.sizes or SIZES[request.like]:
        try:
            number = float(text[:-1]) * UNITS[text[-1]] if text[-1:] in UNITS else float(text)
        except ValueError:
            number = 0.0
        if not 1e3 <= number <= 1e11:
            raise UserError(f"--sizes {text}: give parameters between 1k and 100B, such as 10M")
        sizes.append(number)
    if len(sizes) < 2:
        raise UserError("--sizes names one size: a scale needs two or more")
    return sorted(sizes)


def _plan(request: Request, out: Path, size: Size, before: Exam | Size) -> Exam:
    """The exam of one rung, with steps and learning rates; the rates are those of the smallest rung or of a size."""
    models = find_models(size, request)
    if isinstance(before, Exam):
        known = [(each.rate, without_embedding(each.parameters, each.recipe)) for each in before.entrants]
    else:
        known = [(before.model["learning_rate"], without_embedding(_parameters(before), before.recipe))] * len(models)
    facts = [measure(name, recipe, request.allow_code) for name, recipe in models]
    costs = [each.flops if request.match == "flops" else 1.0 for each in facts]
    budget = costs[0] * request.tokens_per_parameter * facts[0].parameters
    for (_, recipe), fact, cost, (rate, there) in zip(models, facts, costs, known, strict=True):
        _set_training(recipe, round(budget / cost / _tokens_per_step(recipe)), request.options)
        if not recipe["model"].get("base_width"):  # muP scales the parts of the rate in the model itself
            rate = transferred(rate, there, without_embedding(fact.parameters, recipe))
        recipe["model"]["learning_rate"] = rate
    same = {each.name: getattr(request, each.name) for each in dataclasses.fields(Models)}
    first = not isinstance(before, Exam)
    rung = readable(facts[0].parameters)
    exam_request = ExamRequest(**same, out=str(out), size=rung, ladder=request.ladder and first)
    exam = plan_of(exam_request, size, models)
    return exam if first else _with_near_rates(exam, before)


def _with_near_rates(exam: Exam, smallest: Exam) -> Exam:
    """The exam whose seeds take the rates in turn that the ladder of the smallest rung could not tell apart."""

    def spread(entrant: Entrant, there: Entrant) -> Entrant:
        return dataclasses.replace(
            entrant, near_best=tuple(rate * entrant.rate / there.rate for rate in there.near_best)
        )

    first, *others = [spread(*pair) for pair in zip(exam.entrants, smallest.entrants, strict=True)]
    return dataclasses.replace(exam, reference=first, candidates=others)


def _set_training(recipe: dict[str, Any], steps: int, options: Mapping[str, str]) -> None:
    """Set the steps of a model, its warm-up and branches, and measure only finished models."""
    recipe["trainer"] = {**recipe["trainer"], "max_steps": steps}
    recipe["branches"] = {"at": BRANCHES}
    if "model.warmup_steps" not in options:
        recipe["model"]["warmup_steps"] = max(1, round(WARM_UP * steps))
    recipe["ood_loss"] = {**(recipe.get("ood_loss") or {}), "at": [1.0]}
    recipe["attention_entropy"] = {"every_n_steps": 0}


def _tokens_per_step(recipe: Mapping[str, Any]) -> int:
    return int(recipe["data"]["sequence_length"]) * int(recipe["data"]["sequences_per_step"])


def without_embedding(parameters: int, recipe: Mapping[str, Any]) -> int:
    """The parameters without the embedding."""
    return parameters - int(recipe["model"]["vocab_size"]) * int(recipe["model"]["d_model"])


def transferred(rate: float, there: float, here: float) -> float:
    """A learning rate found at some parameters without embedding, for others (arXiv 2412.04403), to three digits."""
    return float(f"{rate * (here / there) ** (-1 / 3):.3g}")
