"""Softmax attention to packed documents, by each kernel of PyTorch that takes borders, next to dense attention."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from seqarch.bench.jobs import Row
from seqarch.bench.timing import DENSE, against, draw, passes
from seqarch.data.packing import borders
from seqarch.errors import UserError
from seqarch.kernels import softmax_attention
from seqarch.kernels.tensors import bound_documents

SHAPES = ((32, 2048, 12, 64), (16, 2048, 16, 128))
"""B, T, H and D of the dense attention; packed, its rows are one."""
TOKENS = (500, 2000)
"""Mean tokens of documents, which begin at random."""


def rows() -> Iterator[Row]:
    for B, T, H, D in SHAPES:
        dense = [row for name, op in DENSE.items() for row in passes(name, op, draw(B, T, H, D), B=B, T=T, H=H, D=D)]
        yield from dense
        for tokens in TOKENS:
            cu_seqlens = bound_documents(drawn_borders(B, T, tokens), T)
            shape = {"B": 1, "T": B * T, "H": H, "D": D, "documents": tokens}
            for name, op in packed(cu_seqlens).items():
                try:
                    found = list(passes(f"{name}, documents of {tokens}", op, draw(1, B * T, H, D), **shape))
                except (RuntimeError, TypeError, ImportError, UserError) as error:
                    yield {"name": f"{name}: {str(error).splitlines()[0]}", **shape}
                    continue
                yield from (against(dense, row) for row in found)


def packed(cu_seqlens: Tensor) -> dict[str, Callable[..., Tensor]]:
    """Attention by each kernel."""
    ours = {name: partial(softmax_attention, cu_seqlens=cu_seqlens, backend=name) for name in ("flex", "fa4")}
    theirs = {"varlen": partial(by_flash, cu_seqlens=cu_seqlens), "cuDNN": partial(by_cudnn, cu_seqlens=cu_seqlens)}
    return {**ours, **theirs}


def by_flash(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Any) -> Tensor:
    """FlashAttention on documents of different lengths."""
    most, scale = cu_seqlens.longest, q.shape[-1] ** -0.5
    borders = cu_seqlens, cu_seqlens, most, most
    o: Any = varlen_attn(q[0], k[0], v[0], *borders, scale=scale, window_size=(-1, 0))
    return o.unsqueeze(0)


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Any) -> Tensor:
    """cuDNN's attention to documents, which PyTorch keeps to itself."""
    most, scale = cu_seqlens.longest, q.shape[-1] ** -0.5
    borders = cu_seqlens, cu_seqlens, most, most
    attend = torch.ops.aten._cudnn_attention_forward
    return attend(q[0], k[0], v[0], None, *borders, True, 0.0, True, False, scale=scale)[0].unsqueeze(0)


def drawn_borders(B: int, T: int, tokens: int) -> Tensor:
    """Borders of documents with this mean number of tokens, in B rows of T tokens, on the GPU."""
    begins = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 1 / tokens
    return borders(begins.cumsum(1).int()).cuda()
