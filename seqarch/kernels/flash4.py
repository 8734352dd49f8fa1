"""FlashAttention-4 (package flash-attn-4, arXiv 2603.05451) as operators, which compiled graphs do not look into.

Its backward pass adds in a fixed order here, so that a resumed run has the bits of one without a break.
"""

import functools
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels.flops import causal_keys, last_queries
from seqarch.kernels.launch import gradient_of, operator
from seqarch.kernels.op import load_function
from seqarch.kernels.packages import INSTALL

TESTED = "4.0.0b36"
"""The version whose functions we call. They are not public, and change between versions."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, slopes: None, cu_seqlens: Tensor | None
) -> Tensor:
    """As `softmax_attention_reference`, in half precision on Hopper and newer GPUs."""
    return forward(q, k, v, scale, window, cu_seqlens)[0]


def _empty(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _D = q.shape
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(B, H, T, dtype=torch.float32)


@functools.cache
def _function(name: str) -> Any:
    found = version("flash-attn-4")
    if found != TESTED:
        raise UserError(f"flash-attn-4 {found} is installed, and seqarch calls {TESTED}: {INSTALL['flash-attn-4']}")
    return load_function(f"flash_attn.cute.interface:{name}")


def _options(scale: float, window: int | None, cu_seqlens: Tensor | None) -> dict[str, Any]:
    left = None if window is None else window - 1
    return {
        **{"softmax_scale": scale, "causal": True, "window_size_left": left},
        **{"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens},
    }


def _packed(cu_seqlens: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, without the batch of one row if documents are packed."""
    return tensors if cu_seqlens is None else tuple(t[0] for t in tensors)


def _flops(q, k, v, scale, window, *_):
    return 4 * last_queries(causal_keys, q, k, window)


@operator("seqarch::flash4_forward", _empty, flops=_flops)
def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp `[B, H, Tq]` of the scores."""
    options = _options(scale, window, cu_seqlens)
    o, lse, *_ = _function("_flash_attn_fwd")(*_packed(cu_seqlens, q, k, v), return_lse=True, **options)
    return o.view(q.shape), lse.view(q.shape[0], q.shape[2], q.shape[1])


@gradient_of(forward, gradients=3, keep=(0, 1))
def backward(do, q, k, v, scale, window, cu_seqlens, o, lse):
    """dq, dk and dv."""
    options = _options(scale, window, cu_seqlens)
    tensors = _packed(cu_seqlens, q, k, v, o, do, lse)
    found = _function("_flash_attn_bwd")(*tensors, deterministic=True, **options)
    return tuple(gradient.view(t.shape) for gradient, t in zip(found, (q, k, v), strict=True))
