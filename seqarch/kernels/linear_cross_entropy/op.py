"""The public linear cross-entropy: checks and the size of a chunk."""

from typing import Literal

import torch
from torch import Tensor

from seqarch.errors import UserError, check_counts
from seqarch.kernels import inputs
from seqarch.kernels.checks import check_choice, check_shapes
from seqarch.kernels.flops import formulas
from seqarch.kernels.linear_cross_entropy.reference import LossSum, token_losses
from seqarch.kernels.op import Op
from seqarch.kernels.tensors import autocast_dtype, is_tracked

CHUNK_LOGITS = {"cuda": 2**28, "cpu": 2**24}
"""Logits of one chunk by device: matrix products large enough to run at full rate."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    """Cross-entropy in nats of `softmax(hidden @ weight^T)`, with the logits of `chunk_tokens` tokens at a time.

    With "mean", gradients are computed together with the loss (Liger, arXiv 2410.10989), so that each chunk's logits
    are made once. The products run in the dtype of `hidden`, or of autocast if it is on. The softmax and the sum
    of the weight's gradient run in float32. `weight` may be wider than `hidden`. Only "none" has second derivatives.

    Args:
        hidden: `[N, d]`.
        weight: `[V, d]`.
        targets: `[N]` int64, each in `0..V-1` or `ignore_index`.
        chunk_tokens: tokens per chunk; None takes what suits the device and V.
        ignore_index: target of the tokens that do not count.
        reduction: "mean" over the tokens that count (NaN when there are none), or "none".

    Returns:
        The mean as a float32 scalar, or `[N]` float32 losses with 0 where ignored (float64 for float64 arguments).

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    check_choice("reduction", reduction, ("mean", "none"))
    check_shapes({"hidden [N, d]": hidden, "weight [V, d]": weight, "targets [N]": targets})
    if targets.dtype != torch.int64:
        raise UserError(f"targets must be int64, not {targets.dtype}")
    if not hidden.is_floating_point() or hidden.shape[0] == 0:
        raise UserError(
            f"hidden must be floating-point with at least one token, not {hidden.dtype} {list(hidden.shape)}"
        )
    dtype = autocast_dtype(hidden)
    if chunk_tokens is None:
        most = CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS["cpu"]) // weight.shape[0]
        chunk_tokens = 1 << max(most, 64).bit_length() - 1
    check_counts(chunk_tokens=chunk_tokens)
    if reduction == "none":
        return token_losses(hidden, weight, targets, chunk_tokens, ignore_index, dtype)
    if is_tracked(hidden, weight):
        total = LossSum.apply(hidden, weight, targets, chunk_tokens, ignore_index, dtype)
    else:
        total = token_losses(hidden, weight, targets, chunk_tokens, ignore_index, dtype).sum()
    return total / (targets != ignore_index).sum()


LINEAR_CROSS_ENTROPY = Op(
    "linear_cross_entropy", token_losses, flops=formulas("add_product"), inputs=inputs.linear_cross_entropy
)
