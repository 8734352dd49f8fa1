"""Checks that a model does not see the tokens that it predicts, before its losses are measured."""

import math

import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.evaluation.scorer import Scorer

LEAST_LEAK = 0.2
"""Nats per token by which later tokens change the losses of a model that is not causal. Rounding stays below it."""
CUTS = 8


def check_causal(scorer: Scorer, row: Tensor) -> None:
    """Raise `UserError` if later tokens change earlier losses: such losses say nothing about a model.

    The row is read many times. Each time its tokens from another place on are replaced, and the loss of the token
    before this place must stay.

    Args:
        scorer: the model; its batches have the shape and strides of `Scorer.measure`, so nothing is compiled anew.
        row: `[T + 1]` tokens.
    """
    size, length = scorer.batch_size, len(row) - 1
    cuts = torch.linspace(length, 1, size * math.ceil(CUTS / size)).long().unsqueeze(1)  # the first replaces nothing
    batches = torch.where(torch.arange(length + 1) < cuts, row, row[0]).to(scorer.device).split(size)
    targets = row.repeat(size, 1).to(scorer.device)[:, 1:]
    with scorer.evaluating():
        passes = [scorer.lm(tokens[:, :-1], targets, reduction="none") for tokens in batches]
    losses = torch.cat(passes).double().cpu()
    if (leak := float((losses - losses[0]).gather(1, cuts - 1).abs().mean())) > LEAST_LEAK:
        by = f"{leak:.2g} nats per token; seqarch.testing.MixerSuite finds the mixer"
        raise UserError(f"the model is not causal: later tokens change its losses by {by}")
