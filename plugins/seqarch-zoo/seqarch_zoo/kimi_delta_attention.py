"""Kimi Delta Attention (arXiv 2510.26692): the gated delta rule with a separate decay for each channel of the keys.

The layer follows the authors' code in flash-linear-attention, fla/layers/kda.py. Initial values follow
modeling_kimi.py of moonshotai/Kimi-Linear-48B-A3B-Instruct, which leaves convolutions as PyTorch draws them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.kernels import Backend, Op, kernels_of
from seqarch.kernels.fla_tuning import fla_recurrence
from seqarch.kernels.rwkv import rwkv7_reference
from seqarch.kernels.tensors import at_least_float32, autocast_cast, check_sequences, is_tracked, softplus
from seqarch.mixers.base import Scale, init_linear, is_fused, size_heads, undecayed
from seqarch.mixers.recurrent import Projected, RecurrentMixer, RecurrentState, init_step_bias
from seqarch.mixers.short_convolution import Kernel, optional_convolution

NORM_EPS = 1e-5


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence of Kimi Delta Attention (arXiv 2510.26692, equation 1).

        S_t = (I - beta_t k_t k_t^T) diag(exp(log_decay_t)) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t / sqrt(K)

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`, of unit length.
        v: values `[B, T, H, V]`.
        log_decay: logarithms of the decays `[B, T, H, K]`, at most zero.
        beta: step sizes `[B, T, H]`.
        initial_state: `[N, H, K, V]`; zeros when None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1).
        backend: "auto", "reference" or "fla".

    Returns:
        Outputs `[B, T, H, V]` and the final state `[N, H, K, V]`.
    """
    shapes = {"q [B, T, H, K]": q, "k [B, T, H, K]": k, "v [B, T, H, V]": v, "log_decay [B, T, H, K]": log_decay}
    check_sequences({**shapes, "beta [B, T, H]": beta, "initial_state [rows, H, K, V]": initial_state}, cu_seqlens)
    q, k, v = autocast_cast(q, k, v)
    return KDA.run(backend, q, k, v, log_decay, beta, initial_state, cu_seqlens)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """RWKV-7's recurrence, of which this is a special case: it looks up the decayed key and subtracts what it finds."""
    dtype, scale = v.dtype, k.shape[-1] ** -0.5
    q, k, v, log_decay, beta = (at_least_float32(t) for t in (q, k, v, log_decay, beta))
    written = beta[..., None] * k
    o, state = rwkv7_reference(
        q, written, v, log_decay, k * log_decay.exp(), -written, scale, initial_state, cu_seqlens
    )
    return o.to(dtype), state


def _fla(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """fla's chunked kernels, or the recurrent kernel for one token without gradients."""
    step = q.shape[1] == 1 and not is_tracked(q, k, v, log_decay, beta, state)
    tensors = {"q": q, "k": k, "v": v, "g": log_decay, "beta": beta}
    return fla_recurrence("kda", **tensors, initial_state=state, cu_seqlens=cu_seqlens, step=step)


KDA = Op("kda", _reference, (Backend("fla", _fla, "fla"),))


class KimiDeltaAttention(RecurrentMixer):
    """The delta rule with a decay for each channel of the keys and gates of low rank.

    Args:
        n_heads: heads H.
        head_dim: size of each head's queries, keys and values; `d_model / n_heads` unless given.
        conv_size: tokens that the short convolution of queries, keys and values sees; 4 unless given.
        conv: whether there is a short convolution.
        neg_eigval: whether beta reaches 2 instead of 1 (arXiv 2411.12537).
        backend: "auto", "reference" or "fla"; with "reference" the convolution is in PyTorch too.
    """

    family: ClassVar[str] = "delta"
    source: ClassVar[str] = "arXiv 2510.26692"
    products: ClassVar[int] = 3
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads", "head_dim": "head"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 6}}
    kernels: ClassVar[Mapping[str, str]] = kernels_of([KDA])

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: int,
        head_dim: int | None = None,
        conv_size: Kernel | None = None,
        conv: bool = True,
        neg_eigval: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, backend)
        KDA.check(backend)
        self.n_heads, self.head_dim = n_heads, size_heads(d_model, n_heads, head_dim)
        self.state_shape = (n_heads, self.head_dim, self.head_dim)
        self.neg_eigval = neg_eigval
        width = n_heads * self.head_dim
        self.qkv = nn.Linear(d_model, 3 * width, bias=False)
        is_fused(self.qkv, width, width, width)
        self.convolution = optional_convolution(3 * width, conv_size, conv, backend=backend)
        self.beta = nn.Linear(d_model, n_heads, bias=False)
        self.decay = nn.Sequential(
            nn.Linear(d_model, self.head_dim, bias=False), nn.Linear(self.head_dim, width, bias=False)
        )
        self.A_log = undecayed(n_heads)
        self.dt_bias = undecayed(width)
        self.gate = nn.Sequential(nn.Linear(d_model, self.head_dim, bias=False), nn.Linear(self.head_dim, width))
        self.norm = nn.RMSNorm(self.head_dim, eps=NORM_EPS)
        self.out = nn.Linear(width, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw matrices normal with standard deviation 0.02, the convolution as `nn.Conv1d`, decays as in Mamba-2."""
        for layer in (self.qkv, self.beta, *self.decay, *self.gate, self.out):
            init_linear(layer)  # pyright: ignore[reportArgumentType]
        if self.convolution is not None:
            self.convolution.reset_parameters()
        self.A_log.uniform_(1, 16).log_()
        init_step_bias(self.dt_bias)
        self.norm.reset_parameters()

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        q, k, v = self.convolved_heads(self.qkv(x), self.n_heads, self.head_dim, state, cu_seqlens)
        beta = at_least_float32(self.beta(x)).sigmoid()
        step = softplus(at_least_float32(self.decay(x)) + self.dt_bias).unflatten(-1, (self.n_heads, self.head_dim))
        log_decay = -at_least_float32(self.A_log).exp()[:, None] * step
        return Projected(v, (q, k, log_decay, 2 * beta if self.neg_eigval else beta), (self.gate(x),))

    def recur(self, values, q, k, log_decay, beta, **options):
        return kda(q, k, values, log_decay, beta, **options, backend=self.backend)

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        wide = at_least_float32(o)
        wide = F.rms_norm(wide, (self.head_dim,), self.norm.weight.to(wide.dtype), NORM_EPS)
        wide = wide * torch.sigmoid(at_least_float32(gate)).view_as(wide)
        return self.out(wide.to(o.dtype).flatten(2))
