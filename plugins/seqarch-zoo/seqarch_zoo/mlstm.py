"""mLSTM, the matrix memory of xLSTM (arXiv 2405.04517): exponential gates, a normaliser and a running maximum.

Layer and initial values follow the authors' code, github.com/NX-AI/xlstm, xlstm/blocks/mlstm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count
from seqarch.errors import UserError
from seqarch.kernels import ssd
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import at_least_float32, check_sequences
from seqarch.mixers.base import Scale, init_linear, is_fused
from seqarch.mixers.recurrent import Projected, RecurrentMixer, RecurrentState
from seqarch.mixers.short_convolution import Kernel, ShortConvolution

NORM_EPS = 1e-5
LARGEST_SLICES = 256, 64
"""Keys and values of a head in a call of `ssd`: its kernels hold no more keys, and few values next to so many."""
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
        backend: "auto", "reference" or another of `seqarch.kernels.ssd`.
    """

    family: ClassVar[str] = "xlstm"
    source: ClassVar[str] = "arXiv 2405.04517"
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 4}}
    ops: ClassVar[tuple[str, ...]] = ("ssd", "short_convolution")

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
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, backend)
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
        return mlstm(q, k, values, log_input, log_forget, backend=self.backend, **options)

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
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The recurrence of mLSTM (arXiv 2405.04517, equations 19 to 27), stabilised as in equation 15.

        C_t = f_t C_{t-1} + i_t k_t [v_t, 1]^T / sqrt(K),   [h_t, n_t] = C_t^T q_t,   o_t = h_t / max(|n_t|, 1)

    A state holds `C exp(-m)` and m, the largest logarithm of a weight so far. The outputs do not depend on m. So C is
    the state of Mamba-2's recurrence, `ssd`, with the decays `f_t exp(m_{t-1} - m_t)` and the steps `i_t exp(-m_t)`.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        log_input: logarithms of the input gates i `[B, T, H]`, of any size.
        log_forget: logarithms of the forget gates f `[B, T, H]`, at most zero.
        initial_state: `[N, H, K, V + 1]` and `[N, H]`.
        cu_seqlens: `[N + 1]` borders of documents packed into one row.
        backend: "auto", "reference" or another of `seqarch.kernels.ssd`.

    Returns:
        Outputs `[B, T, H, V]` in the dtype of `v` and the final state.
    """
    gates = {"log_input [B, T, H]": log_input, "log_forget [B, T, H]": log_forget}
    check_sequences({"q [B, T, H, K]": q, "k [B, T, H, K]": k, "v [B, T, H, V]": v, **gates}, cu_seqlens)
    memory, before = initial_state or (None, None)
    stable, maximum = each_document(_stabilised, (log_input, log_forget), before, cu_seqlens)
    log_decay, log_step, maxima = stable.unbind(-1)
    steps = log_step.exp() * k.shape[-1] ** -0.5
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "backend": backend}
    y, memory = _ssd(F.pad(v, (0, 1), value=1.0), steps, k, q, log_decay, memory, **options)
    o = y[..., :-1] / torch.maximum(y[..., -1:].abs(), (-maxima).exp()[..., None])
    return o.to(v.dtype), (memory, maximum)


def _ssd(
    x: Tensor, steps: Tensor, B: Tensor, C: Tensor, log_decay: Tensor, state: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """As `ssd` for heads of any size, with a float32 output; its kernels get slices of heads.

    The outputs of a head's slices of keys add up, those of its slices of values follow each other.
    """
    H, N, P = *B.shape[2:], x.shape[-1]
    keys = next(n for n in range(1, N + 1) if N % n == 0 and N // n <= LARGEST_SLICES[0])
    width = min(P, LARGEST_SLICES[1])
    missing = -P % width
    x = F.pad(x, (0, missing)).unflatten(-1, (-1, width))
    values = x.shape[3]
    x = x[:, :, :, None].expand(-1, -1, -1, keys, -1, -1).flatten(2, 4)
    B, C = (t.unflatten(-1, (keys, -1)).flatten(2, 3).to(x.dtype) for t in (B, C))
    if state is not None:
        state = F.pad(state, (0, missing)).unflatten(-1, (values, width)).unflatten(2, (keys, -1))
        state = state.transpose(3, 4).flatten(1, 3)
    steps, log_decay = (t.repeat_interleave(keys * values, dim=2) for t in (steps, log_decay))
    y, state = ssd(x, steps, None, B, C, log_decay=log_decay, initial_state=state, **options)
    y = at_least_float32(y).unflatten(2, (H, keys, values)).sum(dim=3).flatten(3)
    state = state.unflatten(1, (H, keys, values)).transpose(3, 4).flatten(2, 3).flatten(3)
    # A copy: a view would keep the padding in memory.
    return y[..., :P], state[..., :P].clone()


def _stabilised(log_input: Tensor, log_forget: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logarithms of decays and steps of the state `C exp(-m)`, and the maxima m `[B, T, H, 3]`; the last m `[B, H]`.

    `before` is m before the first token, 0 for None.
    """
    with torch.no_grad():
        before = torch.zeros_like(log_input[:, 0]) if before is None else before.to(log_input.dtype)
        passed = log_forget.double().cumsum(dim=1)
        maxima = passed + torch.maximum((log_input - passed).cummax(dim=1).values, before[:, None])
        maxima = maxima.to(log_input.dtype)
        earlier = torch.cat((before[:, None], maxima[:, :-1]), dim=1)
    # A copy: a view would keep the maxima of all tokens in memory.
    stable = torch.stack((log_forget + (earlier - maxima), log_input - maxima, maxima), dim=-1)
    return stable, maxima[:, -1].clone()
