"""Token shift: every position sees the token before it (RWKV, arXiv 2305.13048)."""

from typing import Any

import torch
from torch import Tensor

from seqarch.kernels.tensors import document_positions
from seqarch.mixers.short_convolution import ShortConvolutionState


def draw_mixes(layer: Any, **powers: float) -> None:
    """Initial values of a layer's `NAME_mix [d_model]`: each channel's share of the token before, smaller in depth.

    Args:
        layer: has `d_model`, `layer_idx` and `n_layers`.
        powers: by NAME; a larger power gives a larger share of the token before.
    """
    rest = 1 - layer.layer_idx / layer.n_layers
    for name, power in powers.items():
        mix = getattr(layer, f"{name}_mix")
        mix.copy_(1 - (torch.arange(layer.d_model, device=mix.device) / layer.d_model) ** (power * rest))


def token_shift(x: Tensor, *, state: ShortConvolutionState | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """`x [B, T, d_model]` moved by one position: row t holds token t - 1, the first row zeros or the state's token.

    Args:
        x: the sequence.
        state: the token before `x`, `[B, 1, d_model]`; holds the last token of `x` after the call.
        cu_seqlens: `[N + 1]` borders of packed documents, in the whole row; the first token of each sees zeros.
    """
    start = 0
    first = None if state is None else state.last.to(x.dtype)
    if state is not None and state.piece is not None:
        first, start = state.piece.before(x, 1), state.piece.start
    # The compiler fuses a pad, and a row written into it, with what follows, but not cat.
    shifted = torch.constant_pad_nd(x, (0, 0, 1, -1))
    if first is not None:
        shifted[:, :1] = first
    if state is not None:
        # A copy: a view would keep all of x in memory.
        state.last = x[:, -1:].to(state.last.dtype, copy=True)
    if cu_seqlens is not None:
        begins = document_positions(x, start=start, cu_seqlens=cu_seqlens) == 0
        shifted = shifted.masked_fill(begins[:, None], 0)
    return shifted
