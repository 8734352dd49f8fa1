"""Cross-entropy of a linear layer, by chunks of tokens, in plain PyTorch."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seqarch.arguments import COUNT
from seqarch.errors import UserError, check_known
from seqarch.kernels import flops
from seqarch.kernels.op import Op
from seqarch.kernels.tensors import autocast_dtype, check_shapes, is_tracked

CHUNK_LOGITS = {"cuda": 2**28, "cpu": 2**24}
"""Logits of one chunk by device: matrix products large enough to run at full rate."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Cross-entropy in nats of `softmax(hidden @ weight^T)`, with the logits of `chunk_tokens` tokens at a time.

    Except with "none", gradients are computed together with the loss (Liger, arXiv 2410.10989), so that each chunk's
    logits are made once. The products run in the dtype of `hidden`, or of autocast if it is on. The softmax and the sum
    of the weight's gradient run in float32. `weight` may be wider than `hidden`. Only "none" has second derivatives.

    Args:
        hidden: `[N, d]`.
        weight: `[V, d]`.
        targets: `[N]` int64, each in `0..V-1` or `ignore_index`.
        chunk_tokens: tokens per chunk; None takes what suits the device and V.
        ignore_index: target of the tokens that do not count.
        reduction: "mean" over the tokens that count (NaN when there are none), their "sum", or "none".

    Returns:
        The mean or sum as a float32 scalar, or `[N]` float32 losses, 0 where ignored (float64 for float64 arguments).

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    check_known("reduction", reduction, ("mean", "sum", "none"))
    check_shapes({"hidden [N, d] same": hidden, "weight [V, d]": weight, "targets [N] int64": targets})
    dtype = autocast_dtype(hidden)
    if chunk_tokens is None:
        most = CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS["cpu"]) // weight.shape[0]
        chunk_tokens = 1 << max(most, 64).bit_length() - 1
    COUNT.check("chunk_tokens", chunk_tokens)
    if reduction == "none":
        return token_losses(hidden, weight, targets, chunk_tokens, ignore_index, dtype)
    if is_tracked(hidden, weight):
        total = LossSum.apply(hidden, weight, targets, chunk_tokens, ignore_index, dtype)
    else:
        total = token_losses(hidden, weight, targets, chunk_tokens, ignore_index, dtype).sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def token_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Loss of each token, `[N]` float32 (0 where ignored); the backward pass computes the logits again by chunks."""
    recompute = torch.is_grad_enabled()
    pieces = []
    for start in range(0, hidden.shape[0], chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        args = hidden[chunk], weight, targets[chunk], ignore_index, dtype
        if recompute:
            pieces.append(checkpoint(_chunk_losses, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(_chunk_losses(*args))
    return torch.cat(pieces)


def _chunk_losses(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden.to(dtype), weight.to(dtype))
        wide = logits.to(torch.promote_types(dtype, torch.float32))
        return F.cross_entropy(wide, targets, ignore_index=ignore_index, reduction="none")


class LossSum(torch.autograd.Function):
    """The sum of the token losses; forward computes the gradients with it, chunk by chunk, so that no logits are kept.

    The method of Liger's fused linear cross-entropy (arXiv 2410.10989, section 3.2). These are the gradients of the
    sum. They have the scale of a probability, so half precision holds them. The caller takes the mean.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> Tensor:
        """Takes the arguments of `_sum_and_gradients`."""
        with torch.autocast(hidden.device.type, enabled=False):
            total, dhidden, dweight = _sum_and_gradients(hidden, weight, targets, *options)
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # with create_graph; the stored gradients would count as constants
            raise UserError("the mean of linear_cross_entropy has no second derivative: take reduction='none'")
        dhidden, dweight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        (dtotal,) = grads
        return (dhidden * dtotal).to(hidden_dtype), (dweight * dtotal).to(weight_dtype), None, None, None, None


def _sum_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    w = weight.to(dtype)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    dweight = torch.zeros(weight.shape, dtype=wide, device=hidden.device)
    dhidden = []
    # Eager elementwise code would pass over the logits ten times; under torch.compile it is fused with the rest.
    fused = hidden.is_cuda and not torch.compiler.is_compiling()
    of_chunk = _compiled_losses_and_gradient() if fused else losses_and_gradient
    for start in range(0, hidden.shape[0], chunk_tokens):
        h = hidden[start : start + chunk_tokens].to(dtype)
        loss, dlogits = of_chunk(h @ w.t(), targets[start : start + chunk_tokens], ignore_index)
        total = total + loss
        dhidden.append(dlogits @ w)
        dweight = _add_product(dweight, dlogits.t(), h)
    return total, torch.cat(dhidden), dweight


def losses_and_gradient(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Sum of the losses of one chunk of `logits [n, V]`, and its gradient with respect to them, in their dtype."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = wide.logsumexp(1)
    kept = targets != ignore_index
    column = torch.where(kept, targets, 0)
    at_target = logits.gather(1, column.unsqueeze(1)).squeeze(1).to(wide.dtype)
    loss = torch.where(kept, lse - at_target, 0.0).sum()
    p = (wide - lse.unsqueeze(1)).exp()
    is_target = torch.arange(logits.shape[1], device=logits.device) == column.unsqueeze(1)
    dlogits = torch.where(kept.unsqueeze(1), p - is_target.to(p.dtype), 0.0)
    return loss, dlogits.to(logits.dtype)


@functools.cache
def _compiled_losses_and_gradient() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(losses_and_gradient)


@torch.library.custom_op("seqarch::add_product", mutates_args=())
def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`total + a @ b` with the product accumulated in the dtype of `total`, which may be wider than that of a and b.

    An operator of its own because the compiler has no rule for `out_dtype`.
    """
    if a.dtype == total.dtype:
        return torch.addmm(total, a, b)
    return torch.addmm(total, a, b, out_dtype=total.dtype) if a.is_cuda else total + (a @ b).to(total.dtype)


@_add_product.register_fake
def _(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(total)


flops.count("seqarch::add_product", lambda total, a, b: 2 * a[0] * a[1] * b[1])


LINEAR_CROSS_ENTROPY = Op("linear_cross_entropy", token_losses)
