"""Which tokens a model could have recalled from the sequence itself: the "AR hits" of Zoology (arXiv 2312.04927).

A token is recallable if it ends a bigram (the token before it, the token) that occurred earlier in the same sequence
and that is not frequent in training. A frequent bigram, such as "of the", is known without looking back.
"""

import torch
from torch import Tensor

from seqarch.data.datamodule import TextDataModule

FREQUENT = 1e-5
"""A bigram is frequent if more than this share of the training bigrams are equal to it."""
SAMPLE = 1 << 22
"""Training tokens, at most, in which bigrams are counted."""


def recallable(tokens: Tensor, frequent: Tensor) -> Tensor:
    """Which predictions have a recallable target.

    Args:
        tokens: `[b, T + 1]` ids; prediction `t` has the target `tokens[:, t + 1]`.
        frequent: `[K]` codes of the bigrams that do not count, sorted; may be empty.

    Returns:
        `[b, T]` bool.
    """
    codes = bigrams(tokens)
    in_order, places = codes.sort(dim=1, stable=True)
    hits = torch.zeros_like(codes, dtype=torch.bool)
    hits.scatter_(1, places[:, 1:], in_order[:, 1:] == in_order[:, :-1])
    if len(frequent):
        nearest = torch.searchsorted(frequent, codes).clamp(max=len(frequent) - 1)
        hits &= frequent[nearest] != codes
    return hits


def frequent_bigrams(data: TextDataModule) -> Tensor:
    """Codes of the bigrams that are frequent in training, sorted: `[K]` int64.

    The shares of the training domains are weighted like the training mixture. They are counted in `SAMPLE` tokens,
    spread as `training_sample` says.
    """
    codes, shares = [], []
    for weight, tokens in data.training_sample(SAMPLE):
        found, counts = bigrams(tokens).unique(return_counts=True)
        codes.append(found)
        shares.append(weight * counts.double() / counts.sum())
    unique, index = torch.cat(codes).unique(return_inverse=True)
    total = torch.zeros(len(unique), dtype=torch.float64).index_add_(0, index, torch.cat(shares))
    return unique[total > FREQUENT]


def bigrams(tokens: Tensor) -> Tensor:
    """A code for each pair of neighbours of `tokens [b, T + 1]`: `[b, T]` int64, equal for equal pairs."""
    return (tokens[:, :-1] << 32) + tokens[:, 1:]
