"""Which tokens a model could have recalled from the sequence itself: the "AR hits" of Zoology (arXiv 2312.04927).

A token is recallable if it ends a bigram (the token before it, the token) that occurred earlier in the same sequence
and that is not frequent in training. A frequent bigram, such as "of the", is known without looking back.
"""

import torch
from torch import Tensor

from seqarch.data.datamodule import TextDataModule
from seqarch.data.packing import predicted

FREQUENT = 1e-5
"""A bigram is frequent if more than this share of the training bigrams are equal to it."""
SAMPLE = 1 << 22
"""Training tokens, at most, in which bigrams are counted."""


def recallable(tokens: Tensor, frequent: Tensor, segments: Tensor | None = None) -> Tensor:
    """Which predictions have a recallable target.

    Args:
        tokens: `[b, T + 1]` ids; prediction `t` has the target `tokens[:, t + 1]`.
        frequent: `[K]` codes of the bigrams that do not count, sorted; may be empty.
        segments: `[b, T + 1]`, with a document mask; only bigrams of the same document then count.

    Returns:
        `[b, T]` bool.
    """
    codes = bigrams(tokens)
    in_order, places = codes.sort(dim=1, stable=True)
    hits = torch.zeros_like(codes, dtype=torch.bool)
    again = in_order[:, 1:] == in_order[:, :-1]
    if segments is not None:  # of equal bigrams, the one before is the nearest: in no other document if any is in this
        documents, within = (of.gather(1, places) for of in (segments[:, 1:], predicted(segments)))
        again &= (documents[:, 1:] == documents[:, :-1]) & within[:, 1:] & within[:, :-1]
    hits.scatter_(1, places[:, 1:], again)
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
    for weight, tokens, segments in data.training_sample(SAMPLE):
        every = bigrams(tokens)
        found, counts = (every if segments is None else every[predicted(segments)]).unique(return_counts=True)
        codes.append(found)
        shares.append(weight * counts.double() / counts.sum())
    unique, index = torch.cat(codes).unique(return_inverse=True)
    total = torch.zeros(len(unique), dtype=torch.float64).index_add_(0, index, torch.cat(shares))
    return unique[total > FREQUENT]


def bigrams(tokens: Tensor) -> Tensor:
    """A code for each pair of neighbours of `tokens [b, T + 1]`: `[b, T]` int64, equal for equal pairs."""
    return (tokens[:, :-1] << 32) + tokens[:, 1:]
