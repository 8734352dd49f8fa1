"""Top-1 element attention on Triton: the launches, registered as operators so that torch.compile sees them whole."""

from typing import Literal

import torch
import triton
from torch import Tensor

from seqarch.kernels.launch import gradient_of, operator, padded, precision, rows, sizes, strides
from seqarch.kernels.top1_chunk.layout import bucket_queries
from seqarch.kernels.top1_element.triton_attend import (
    forward_kernel,
    key_backward_kernel,
    query_backward_kernel,
    value_backward_kernel,
)

VALUE_KEYS, VALUE_QUERIES = 64, 64
"""Keys per program and queries per step of the gradient of v."""


LAUNCHES = {
    "forward": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
    "query": {64: (64, 64, 4, 3), 128: (64, 32, 4, 3), 256: (64, 32, 8, 2)},
    "key": {64: (64, 128, 4, 3), 128: (64, 64, 4, 2), 256: (32, 128, 8, 2)},
}
"""Queries and keys per block, warps and steps in flight of each kernel, for head dims up to 64, 128 and 256."""
LAUNCHES_FLOAT32 = {
    "forward": {64: (64, 32, 8, 1), 128: (64, 32, 8, 1), 256: (64, 32, 8, 1)},
    "query": {64: (64, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 32, 8, 1)},
    "key": {64: (32, 64, 8, 1), 128: (64, 32, 8, 1), 256: (16, 16, 4, 1)},
}


def launch(kernel: Literal["forward", "query", "key"], q: Tensor) -> tuple[int, int, dict[str, int]]:
    """Queries and keys per block of one of the kernels, and its launch options."""
    launches = LAUNCHES_FLOAT32 if q.dtype == torch.float32 else LAUNCHES
    BT, BK, warps, stages = launches[kernel][max(padded(q.shape[-1]), 64)]
    return BT, BK, {"num_warps": warps, "num_stages": stages}


def borders(cu_seqlens: Tensor | None, length: int) -> tuple[Tensor | None, Tensor | None]:
    """First and end position of the document of each of `length` positions, `[length]` int32."""
    if cu_seqlens is None:
        return None, None
    position = torch.arange(length, device=cu_seqlens.device, dtype=torch.int32)
    document = torch.searchsorted(cu_seqlens, position, right=True)
    return cu_seqlens[document - 1], cu_seqlens[document]


def _empty(q, k, v, scale, cu_seqlens):
    B, Tq, H, _ = q.shape
    o = torch.empty(q.shape, dtype=v.dtype, device=q.device)
    return o, *(torch.empty(B, H, Tq, dtype=dtype, device=q.device) for dtype in (torch.float32, torch.int32))


@operator("seqarch::top1_element_forward", _empty)
def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The output and, for each query `[B, H, Tq]`, the largest score in base 2 and the key that has it."""
    B, Tq, Tk, H, HK, D = sizes(q, k)
    q, k, v = rows(q), rows(k), rows(v)
    o, top, index = _empty(q, k, v, scale, cu_seqlens)
    first, _ = borders(cu_seqlens, Tk)
    BT, BK, options = launch("forward", q)
    forward_kernel[(triton.cdiv(Tq, BT) * B * H,)](
        q, k, v, first, o, top, index, *strides(q), *strides(k), *strides(v), H, HK, Tq, Tk, Tk - Tq, scale,
        D, padded(D), BT, BK, cu_seqlens is not None, precision(q), **options,
    )  # fmt: skip
    return o, top, index


@gradient_of(forward, gradients=3, keep=(1, 2))
def backward(do, q, k, v, scale, cu_seqlens, top, index):
    """dq, dk and dv."""
    B, Tq, Tk, H, HK, D = sizes(q, k)
    q, k, v, do = rows(q), rows(k), rows(v), rows(do)
    first, stop = borders(cu_seqlens, Tk)
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    lse, delta = torch.empty_like(top), torch.empty_like(top)
    shape = (*strides(q), *strides(k), *strides(v), *strides(do), H, HK, Tq, Tk, Tk - Tq, scale, D, padded(D))
    BT, BK, options = launch("query", q)
    query_backward_kernel[(triton.cdiv(Tq, BT) * B * H,)](
        q, k, v, do, first, top, index, lse, delta, dq, *shape, BT, BK, first is not None, precision(q), **options
    )
    BT, BK, options = launch("key", q)
    key_backward_kernel[(triton.cdiv(Tk, BK) * B * HK,)](
        q, k, v, do, stop, lse, delta, dk, *shape, BT, BK, first is not None, precision(q), **options
    )
    # Sort queries by the block of keys that they selected from: one program adds up the queries of one block.
    blocks = triton.cdiv(Tk, VALUE_KEYS)
    row = torch.arange(0, B * HK * blocks, blocks, dtype=torch.int32, device=q.device)
    segment = index.view(B * HK, -1) // VALUE_KEYS + row.unsqueeze(1)
    buckets = bucket_queries(segment.flatten(), B * HK * blocks)
    value_backward_kernel[(B * HK * blocks,)](
        do, index, buckets.order, buckets.offsets, dv, *strides(do), H, HK, Tq, Tk, blocks,
        D, padded(D), VALUE_KEYS, VALUE_QUERIES, precision(q), num_warps=4, num_stages=1,
    )  # fmt: skip
    return dq, dk, dv


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor | None) -> Tensor:
    """As the public `top1_element_attention`."""
    return forward(q, k, v, scale, cu_seqlens)[0]
