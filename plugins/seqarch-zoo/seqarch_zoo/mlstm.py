"""mLSTM, the matrix memory of xLSTM (arXiv 2405.04517): exponential gates, a normaliser and a running maximum.

Layer and initial values follow the authors' code, github.com/NX-AI/xlstm, xlstm/blocks/mlstm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count
from seqarch.errors import UserError
from seqarch.kernels.chunks import join_chunks, split_chunks
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import at_least_float32, check_sequences
from seqarch.mixers.base import Scale, init_linear, is_fused
from seqarch.mixers.recurrent import Projected, RecurrentMixer, RecurrentState
from seqarch.mixers.short_convolution import Kernel, ShortConvolution

CHUNK_SIZES = 64, 256
"""The shortest and the longest chunk. Between them a chunk has K tokens: states and weights then take equal memory."""
NORM_EPS = 1e-5
SMALL_BLOCK = 8
"""Widest block of the projections that is computed without matrix products."""


class MLSTM(RecurrentMixer):
    """The mLSTM layer: the memory between an expansion with a short convolution and a gated contraction.

    A published block has no feed-forward layer, so a recipe names this mixer in `no_feed_forward`.

    Args:
        n_heads: heads H, a divisor of the inner width.
        expand: inner width in multiples of `d_model`.
        conv_size: tokens that the convolution sees, the current one included.
        block_size: width of the blocks of the projections to queries, keys and values; a divisor of the inner width.
    """

    family: ClassVar[str] = "xlstm"
    source: ClassVar[str] = "arXiv 2405.04517"
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 4}}
    kernels: ClassVar[Mapping[str, str]] = {"cpu": "PyTorch", "cuda": "PyTorch"}

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: Count = 4,
        expand: Count = 2,
        conv_size: Kernel = 4,
        block_size: Count = 4,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        width = expand * d_model
        for option, size in (("n_heads", n_heads), ("block_size", block_size)):
            if width % size:
                raise UserError(f"{option}={size} does not divide the inner width, expand * d_model = {width}")
        self.n_heads, self.head_dim = n_heads, width // n_heads
        self.state_shape = ((n_heads, self.head_dim, self.head_dim + 1), (n_heads,))
        self.up = nn.Linear(d_model, 2 * width, bias=False)
        is_fused(self.up, width, width)
        self.convolution = ShortConvolution(width, conv_size, bias=True)
        self.qkv = nn.Parameter(torch.empty(3, width // block_size, block_size, block_size))
        self.gates = nn.Linear(3 * width, 2 * n_heads)
        is_fused(self.gates, n_heads, n_heads)
        self.norm_weight = nn.Parameter(torch.empty(width))
        self.skip = nn.Parameter(torch.empty(width))
        self.down = nn.Linear(width, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the authors do: forget gates start open, input gates near one."""
        small = math.sqrt(2 / (5 * self.d_model))
        init_linear(self.up, small)
        if self.convolution is not None:
            self.convolution.reset_parameters()
        self.qkv.normal_(std=small)
        self.gates.weight.zero_()
        into, forget = self.gates.bias.chunk(2)
        into.normal_(std=0.1)
        forget.copy_(torch.linspace(3, 6, self.n_heads))
        self.norm_weight.fill_(1)
        self.skip.fill_(1)
        init_linear(self.down, 2 / self.n_layers / math.sqrt(self.d_model))

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        inner, outer = self.up(x).chunk(2, dim=-1)
        convolved = self.convolved(inner, state, cu_seqlens)
        q, k, v = (self._blocks(t, weight) for t, weight in zip((convolved, convolved, inner), self.qkv, strict=True))
        into, forget = at_least_float32(self.gates(torch.cat((q, k, v), dim=-1))).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_heads, self.head_dim)) for t in (q, k, v))
        return Projected(v, (q, k, into, F.logsigmoid(forget)), (convolved, outer))

    def _blocks(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [B, T, width]` times a block-diagonal matrix, `weight [blocks, out, in]`."""
        x, weight = x.unflatten(-1, weight.shape[::2]), weight.to(x.dtype)
        if weight.shape[-1] > SMALL_BLOCK:
            return torch.einsum("btni,noi->btno", x, weight).flatten(2)
        # Sums that the compiler fuses: matrix products of such a size would take most of the layer's time.
        return sum(x[..., i, None] * weight[:, :, i] for i in range(weight.shape[-1])).flatten(2)  # pyright: ignore

    def recur(self, values, q, k, log_input, log_forget, **options):
        return mlstm(q, k, values, log_input, log_forget, **options)

    def finish(self, o: Tensor, convolved: Tensor, outer: Tensor) -> Tensor:
        wide = F.layer_norm(at_least_float32(o), (self.head_dim,), eps=NORM_EPS).flatten(2) * self.norm_weight
        return self.down(((wide + self.skip * convolved) * F.silu(outer)).to(o.dtype))

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of a recurrence and of the block-diagonal projections; see `Mixer.flops_per_token`."""
        blocks = 2.0 * self.qkv.numel() * (3 if training else 1)
        return super().flops_per_token(seq_len, training=training) + blocks


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_input: Tensor,
    log_forget: Tensor,
    *,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The recurrence of mLSTM (arXiv 2405.04517, equations 19 to 27), stabilised as in equation 15.

        C_t = f_t C_{t-1} + i_t k_t [v_t, 1]^T / sqrt(K),   [h_t, n_t] = C_t^T q_t,   o_t = h_t / max(|n_t|, 1)

    A state holds `C exp(-m)` and m, the largest logarithm of a weight so far. The outputs do not depend on m.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        log_input: logarithms of the input gates i `[B, T, H]`, of any size.
        log_forget: logarithms of the forget gates f `[B, T, H]`, at most zero.
        initial_state: `[N, H, K, V + 1]` and `[N, H]`.
        cu_seqlens: `[N + 1]` borders of documents packed into one row.

    Returns:
        Outputs `[B, T, H, V]` in the dtype of `v` and the final state.
    """
    gates = {"log_input [B, T, H]": log_input, "log_forget [B, T, H]": log_forget}
    check_sequences({"q [B, T, H, K]": q, "k [B, T, H, K]": k, "v [B, T, H, V]": v, **gates}, cu_seqlens)
    shortest, longest = CHUNK_SIZES
    run = partial(_chunked, size=min(max(q.shape[-1], shortest), longest, q.shape[1]))
    return each_document(run, (q, k, v, log_input, log_forget), initial_state, cu_seqlens)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, log_input: Tensor, log_forget: Tensor, initial_state: Any, *, size: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    with torch.autocast(q.device.type, enabled=False):
        dtype, length = v.dtype, q.shape[1]
        q, k, v, log_input, log_forget = (at_least_float32(t) for t in (q, k, v, log_input, log_forget))
        q, k, v = (split_chunks(t, size) for t in (q * k.shape[-1] ** -0.5, k, v))
        # Tokens after the end neither write nor forget.
        log_input = split_chunks(log_input[..., None], size, -math.inf)
        passed = split_chunks(log_forget[..., None], size).cumsum(dim=-2)
        lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        weights = (passed + (log_input - passed).mT).masked_fill(~lower, -math.inf)
        writes = passed[..., -1:, :] - passed + log_input
        states, sums, maxima, final = _carry(k, v, writes, passed[..., -1:, :], initial_state)
        stabiliser = torch.maximum(weights.detach().amax(dim=-1, keepdim=True), (maxima + passed).detach())
        inside = (q @ k.mT) * (weights - stabiliser).exp()
        kept = (maxima + passed - stabiliser).exp()
        h = inside @ v + kept * (q @ states)
        n = inside.sum(dim=-1, keepdim=True) + kept * (q * sums).sum(dim=-1, keepdim=True)
        o = h / torch.maximum(n.abs(), (-stabiliser).exp())
        return join_chunks(o, length).to(dtype), final


def _carry(
    k: Tensor, v: Tensor, writes: Tensor, total: Tensor, initial_state: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Matrices `[B, H, N, K, V]`, normalisers `[B, H, N, 1, K]` and maxima `[B, H, N, 1, 1]` before each chunk.

    The final state comes last. Normalisers are separate: V + 1 columns would be a slow size for matrix products.
    """
    B, H, _, _, K = k.shape
    if initial_state is None:
        state, maximum = k.new_zeros(B, H, K, v.shape[-1] + 1), k.new_zeros(B, H, 1, 1)
    else:
        state, maximum = initial_state[0].to(k.dtype), initial_state[1].to(k.dtype)[..., None, None]
    matrix, normaliser = state[..., :-1], state[..., -1:].mT
    highest = writes.detach().amax(dim=-2, keepdim=True)
    before = []
    for key, value, write, passed, most in zip(*(t.unbind(2) for t in (k, v, writes, total, highest)), strict=True):
        before.append((matrix, normaliser, maximum))
        later = torch.maximum(maximum + passed.detach(), most)
        keys = key * (write - later).exp()
        kept = (maximum + passed - later).exp()
        matrix = kept * matrix + keys.mT @ value
        normaliser = kept * normaliser + keys.sum(dim=-2, keepdim=True)
        maximum = later
    matrices, normalisers, maxima = (torch.stack(each, dim=2) for each in zip(*before, strict=True))
    return matrices, normalisers, maxima, (torch.cat((matrix, normaliser.mT), dim=-1), maximum[..., 0, 0])
