"""The implied attention of a recurrent mixer: the weight of each earlier token's value in an output.

A recurrence that is linear in its values can be unrolled to `o_i = sum_{j <= i} w_ij v_j`, with weights `w_ij` that
depend only on keys, queries and decays. They are read off by feeding it unit impulses: with `v_j = e_j` the output
`o_i` is the row `w_i`. Normalised by absolute value they are a distribution. Its entropy is the counterpart of the
entropy of softmax attention, but another quantity: the weights may be negative and need not sum to one.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def implied_entropy(respond: Callable[[Tensor], Tensor], values: Tensor, *, columns: int = 64) -> Tensor:
    """Entropy in nats of `|w_ij| / sum_j |w_ij|`, `[B, T, H]` float32.

    Memory is linear in T: impulses are fed in groups of `columns` tokens.

    Args:
        respond: the recurrence as a function of its values only, `[B, T, H, columns]` to the same shape.
        values: the mixer's values `[B, T, H, D]`, for shape, dtype and device.
        columns: tokens whose weights are computed at once.
    """
    B, T, H = values.shape[:3]
    total = torch.zeros(B, T, H, device=values.device, dtype=torch.promote_types(values.dtype, torch.float32))
    weighted = torch.zeros_like(total)
    for start in range(0, T, columns):
        impulses = values.new_zeros(T, columns)
        count = min(columns, T - start)
        impulses[start : start + count, :count].fill_diagonal_(1)
        weight = respond(impulses[None, :, None].expand(B, T, H, columns)).to(total.dtype).abs()
        total += weight.sum(-1)
        weighted += torch.xlogy(weight, weight).sum(-1)
    # H = -sum p ln p with p = w / Z; a row without any weight has no spread.
    safe = total.clamp_min(torch.finfo(total.dtype).tiny)
    return (safe.log() - weighted / safe).masked_fill(total == 0, 0).clamp_min(0).float()
