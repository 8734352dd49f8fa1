"""A rule of transfer across widths: muP (Yang et al. 2022, arXiv 2203.03466) for AdamW.

With m = `d_model` / `base_width` and r as the inputs of a matrix over its inputs at the base width, mostly m:

| parameters | initial values | learning rate |
| --- | --- | --- |
| matrix | those at the base width / sqrt(r) | 1 / r |
| last norm | 1 / m | 1 / m |
| embedding, head, vector | those at the base width | 1 |

The last norm carries the factor 1 / m of the logits, whether the head is tied or not. AdamW moves its weight w / m at
the rate 1 / m as it would move w. So no factor is left in the model, and a checkpoint is read as any other.

Weight decay is divided by the factor of the rate. The share of a weight that decays in a step is then the same at all
widths (Wang and Aitchison 2024, arXiv 2405.13698). Heads must keep their size: a wider model has more of them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from seqarch.model.lm import SequenceLM, embedding_std
from seqarch.model.roles import Scaling


class Factors(NamedTuple):
    """What a parameter's initial values and its learning rate are multiplied by."""

    initial: float = 1.0
    rate: float = 1.0


def transfer_factors(lm: SequenceLM, base_width: int | None) -> dict[str, Factors]:
    """The factors of each parameter of a model, by name; without a base width there are none."""
    if base_width is None:
        return {}
    wider = lm.d_model / base_width
    drawn = {"normalised": lm.embedding_norm is not None, "tied": lm.head.weight is lm.embedding.weight}
    here, there = (embedding_std(lm.vocab_size, width, **drawn) for width in (lm.d_model, base_width))
    factors: dict[str, Factors] = {}
    for name, kind in lm.kinds.items():
        role = kind.role
        if name.startswith("norm."):
            factors[name] = Factors(1 / wider, 1 / wider)
        elif role == "embedding":
            factors[name] = Factors(there / here)
        elif role == "head":
            factors[name] = Factors()
        else:
            more_inputs = _more_inputs(lm.scalings[name], lm.d_model, base_width)
            rate = 1 / more_inputs if role == "matrix" else 1.0
            factors[name] = Factors(_initial_factor(lm.scalings[name], wider, more_inputs), rate)
    return factors


@torch.no_grad()
def scale_initial(lm: SequenceLM, factors: Mapping[str, Factors]) -> None:
    """Multiply the initial values of a new model by their factors."""
    parameters = dict(lm.named_parameters())
    for name, factor in factors.items():
        parameters[name].mul_(factor.initial)


def _more_inputs(scaling: Scaling, width: int, base_width: int) -> float:
    """The inputs of a matrix over its inputs at the base width."""
    inputs_at = scaling.inputs_at
    return width / base_width if inputs_at is None else inputs_at(width) / inputs_at(base_width)


def _initial_factor(scaling: Scaling, wider: float, more_inputs: float) -> float:
    """What keeps the size of the outputs. PyTorch's own initial values, and square orthogonal ones, keep it anyway."""
    if scaling.fixed_std:
        return more_inputs**-0.5
    return (wider / more_inputs) ** 0.5 if scaling.orthogonal else 1.0
