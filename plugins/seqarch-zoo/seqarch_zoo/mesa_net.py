"""MesaNet (arXiv 2506.05233): each output solves a regularised least-squares problem over all tokens so far.

Layer and initial values follow the authors' code in flash-linear-attention, fla/layers/mesa_net.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.errors import UserError, check_counts
from seqarch.kernels import Backend, Op, kernels_of
from seqarch.kernels.checks import check_sequences
from seqarch.kernels.chunks import join_chunks, split_chunks
from seqarch.kernels.fla_tuning import fla_op
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import at_least_float32, autocast_cast
from seqarch.mixers.base import Scale, init_linear, other_backend, size_heads, undecayed
from seqarch.mixers.recurrent import Projected, RecurrentMixer, RecurrentState
from seqarch.mixers.short_convolution import ShortConvolution, check_kernel

CHUNK_SIZE = 64
NORM_EPS = 1e-5
CG_EPS = 1e-5
"""Keeps the steps of conjugate gradients finite once they have converged."""
States = tuple[Tensor, Tensor]


def mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    regulariser: Tensor,
    *,
    cg_steps: int = 30,
    initial_state: States | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, States]:
    """The Mesa layer (arXiv 2506.05233, equations 6 to 9), by conjugate gradients.

        G_t = a_t G_{t-1} + beta_t k_t k_t^T,   S_t = a_t S_{t-1} + beta_t k_t v_t^T,
        o_t = S_t^T (G_t + diag(regulariser))^{-1} q_t,   a_t = exp(log_decay_t)

    Args:
        q: queries `[B, T, H, K]`, of unit length.
        k: keys `[B, T, H, K]`, of unit length.
        v: values `[B, T, H, K]`.
        log_decay: logarithms of the decays a `[B, T, H]`, at most zero.
        beta: step sizes `[B, T, H]`, positive.
        regulariser: `[H, K]`, positive.
        cg_steps: steps of conjugate gradients.
        initial_state: G and S, `[N, H, K, K]` each; zeros when None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1).
        backend: "auto", "reference" or "fla".

    Returns:
        Outputs `[B, T, H, K]` and the final G and S.
    """
    shapes = {"q [B, T, H, K]": q, "k [B, T, H, K]": k, "v [B, T, H, V]": v, "log_decay [B, T, H]": log_decay}
    check_sequences({**shapes, "beta [B, T, H]": beta, "regulariser [H, K]": regulariser}, cu_seqlens)
    q, k, v = autocast_cast(q, k, v)
    return MESA_NET.run(backend, q, k, v, log_decay, beta, regulariser, cg_steps, initial_state, cu_seqlens)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    regulariser: Tensor,
    cg_steps: int,
    initial_state: States | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, States]:
    run = partial(_chunked, regulariser=regulariser, cg_steps=cg_steps)
    return each_document(run, (q, k, v, log_decay, beta), initial_state, cu_seqlens)


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: States | None,
    *,
    regulariser: Tensor,
    cg_steps: int,
) -> tuple[Tensor, States]:
    """In chunks. G_t is only multiplied with vectors, through the state before the chunk and the keys inside it."""
    with torch.autocast(q.device.type, enabled=False):
        dtype, length = v.dtype, q.shape[1]
        size = min(CHUNK_SIZE, length)
        q, k, v, g, b = (
            split_chunks(at_least_float32(t), size) for t in (q, k, v, log_decay[..., None], beta[..., None])
        )
        g = g.cumsum(dim=-2)
        lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        ratio = (g - g.mT).masked_fill(~lower, -math.inf).exp() * b.mT
        since_start, to_end = g.exp(), (g[..., -1:, :] - g).exp() * b
        states, final = _carry(k, v, to_end, since_start[..., -1:, :], initial_state)
        before, sums = states

        def gram(p: Tensor) -> Tensor:
            """`(G_t + diag(regulariser)) p_t` for all t at once."""
            inside = ((p @ k.mT) * ratio) @ k
            return (p * since_start) @ before + inside + regulariser[:, None, None].to(p.dtype) * p

        x = conjugate_gradients(gram, q, cg_steps)
        o = (x * since_start) @ sums + ((x @ k.mT) * ratio) @ v
        return join_chunks(o, length).to(dtype), final


def _carry(k: Tensor, v: Tensor, to_end: Tensor, passed: Tensor, initial_state: States | None) -> tuple[States, States]:
    """G and S before each chunk `[B, H, N, K, K]`, and the final ones."""
    B, H, N, _, K = k.shape
    if initial_state is None:
        state = k.new_zeros(B, H, K, K + v.shape[-1])
    else:
        state = torch.cat(initial_state, dim=-1).to(k.dtype)
    written = (k * to_end).mT @ torch.cat((k, v), dim=-1)
    states = []
    for n in range(N):
        states.append(state)
        state = passed[:, :, n] * state + written[:, :, n]
    widths = [K, v.shape[-1]]
    before, sums = torch.stack(states, dim=2).split(widths, dim=-1)
    gram, sum_ = state.split(widths, dim=-1)
    return (before, sums), (gram.contiguous(), sum_.contiguous())


def conjugate_gradients(product: Callable[[Tensor], Tensor], right: Tensor, steps: int) -> Tensor:
    """Conjugate gradients: x `[..., K]` with `product(x) = right` for a positive definite product, starting at zero."""
    x, r = torch.zeros_like(right), right
    p, squared = r, (r * r).sum(dim=-1, keepdim=True)
    for _ in range(steps):
        moved = product(p)
        alpha = squared / ((p * moved).sum(dim=-1, keepdim=True) + CG_EPS)
        x, r = x + alpha * p, r - alpha * moved
        squared, last = (r * r).sum(dim=-1, keepdim=True), squared
        p = r + squared / (last + CG_EPS) * p
    return x


GRADIENT = 16.0
"""The largest gradient of an output that fla's kernels get, to a factor of two."""


class GradientScale:
    """Gives a linear backward pass gradients of a fixed size, and scales its own back.

    fla's backward pass solves by conjugate gradients too, adds 1e-5 to their denominators and keeps the solution in
    float16. Gradients of outputs below about 1e-3 thus lose those of q and k. A loss averaged over a batch gives far
    smaller ones.
    """

    factor: Tensor

    def enter(self, *inputs: Tensor | None) -> list[Tensor | None]:
        """The inputs of the op; their gradients are divided by the factor."""
        return [None if each is None else _ScaledBack.apply(each, self) for each in inputs]

    def leave(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the op; their gradients are multiplied by the factor, a power of two."""
        return _Scaled.apply(self, *outputs)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scale: GradientScale, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.scale = scale
        return tuple(each.view_as(each) for each in outputs)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        largest = torch.stack([each.abs().amax().float() for each in gradients]).amax()
        factor = torch.exp2((GRADIENT / largest).log2().floor())
        ctx.scale.factor = torch.where(factor.isfinite(), factor, 1.0)  # no gradient, or one that is not finite
        return None, *(each * ctx.scale.factor.to(each.dtype) for each in gradients)


class _ScaledBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, each: Tensor, scale: GradientScale) -> Tensor:
        ctx.scale = scale
        return each.view_as(each)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient / ctx.scale.factor.to(gradient.dtype), None


@torch.compiler.disable()
def _fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    regulariser: Tensor,
    cg_steps: int,
    initial_state: States | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, States]:
    gram, sums = (None, None) if initial_state is None else (t.contiguous() for t in initial_state)
    scale = GradientScale()
    q, k, v, log_decay, beta, regulariser, gram, sums = scale.enter(q, k, v, log_decay, beta, regulariser, gram, sums)
    o, gram, sums = fla_op("fla.ops.mesa_net", "chunk_mesa_net")(
        q=q,
        k=k,
        v=v,
        g=log_decay,
        beta=beta,
        lamb=regulariser,
        h_kk_init=gram,
        h_kv_init=sums,
        output_final_state=True,
        max_CG_iteration=cg_steps,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )
    o, gram, sums = scale.leave(o, gram, sums)
    return o.to(v.dtype), (gram, sums)


def _obstacle(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> str | None:
    if v.shape[-1] != q.shape[-1]:
        return f"it takes values as wide as keys, not {v.shape[-1]} and {q.shape[-1]} dims"
    return f"it takes heads of at most 128 dims, not {q.shape[-1]}" if q.shape[-1] > 128 else None


MESA_NET = Op("mesa_net", _reference, (Backend("fla", _fla, "fla", obstacle=_obstacle),))


class MesaNet(RecurrentMixer):
    """Linear attention whose queries are first divided by the regularised Gram matrix of the keys.

    Args:
        n_heads: heads H.
        head_dim: size of each head's queries, keys and values; `d_model / n_heads` unless given.
        conv_size: tokens that the short convolution of queries and keys sees.
        cg_steps: steps of conjugate gradients.
        lowest_regulariser: lower bound of the regulariser.
        backend: "auto", "reference" or "fla"; with "reference" the convolution is in PyTorch too.
    """

    family: ClassVar[str] = "mesa"
    source: ClassVar[str] = "arXiv 2506.05233"
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads", "head_dim": "head"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 6}}
    kernels: ClassVar[Mapping[str, str]] = kernels_of([MESA_NET])

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: int,
        head_dim: int | None = None,
        conv_size: int = 4,
        cg_steps: int = 30,
        lowest_regulariser: float = 0.25,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, backend)
        check_counts(cg_steps=cg_steps)
        check_kernel("conv_size", conv_size)
        MESA_NET.check(backend)
        if not 0 < lowest_regulariser < 1:
            raise UserError(f"lowest_regulariser must lie between 0 and 1, not {lowest_regulariser}")
        self.n_heads, self.head_dim = n_heads, size_heads(d_model, n_heads, head_dim)
        square = (n_heads, self.head_dim, self.head_dim)
        self.state_shape = (square, square)
        self.cg_steps, self.lowest = cg_steps, lowest_regulariser
        width = n_heads * self.head_dim
        self.qk = nn.Linear(d_model, 2 * width, bias=False)
        self.value = nn.Linear(d_model, width, bias=False)
        self.convolution = ShortConvolution(2 * width, conv_size, backend=other_backend(backend))
        self.steps = nn.Linear(d_model, 2 * n_heads)
        self.regulariser = undecayed(width)
        self.norm = nn.RMSNorm(self.head_dim, eps=NORM_EPS)
        self.out = nn.Linear(width, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the authors do: the regulariser starts at one."""
        for layer in (self.qk, self.value, self.steps, self.out):
            init_linear(layer)
        if self.convolution is not None:
            nn.init.normal_(self.convolution.weight, std=0.02)
        self.regulariser.fill_(math.log(math.expm1(1 - self.lowest)))
        self.norm.reset_parameters()

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        heads = (self.n_heads, self.head_dim)
        q, k = self.convolved(self.qk(x), state, cu_seqlens).chunk(2, dim=-1)
        q, k = (_unit(t.unflatten(-1, heads)) for t in (q, k))
        decay, beta = at_least_float32(self.steps(x)).chunk(2, dim=-1)
        return Projected(self.value(x).unflatten(-1, heads), (q, k, F.logsigmoid(decay), beta.sigmoid()))

    def recur(self, values, q, k, log_decay, beta, **options):
        regulariser = (F.softplus(at_least_float32(self.regulariser)) + self.lowest).unflatten(0, q.shape[2:])
        options |= {"cg_steps": self.cg_steps, "backend": self.backend}
        return mesa_net(q, k, values, log_decay, beta, regulariser, **options)

    def finish(self, o: Tensor) -> Tensor:
        return self.out(self.norm(o).to(o.dtype).flatten(2))

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of a recurrence, and a product with G in each step; see `Mixer.flops_per_token`."""
        steps = 2.0 * self.cg_steps * self.n_heads * self.head_dim**2 * (3 if training else 1)
        return super().flops_per_token(seq_len, training=training) + steps


def _unit(t: Tensor) -> Tensor:
    return F.normalize(at_least_float32(t), dim=-1).to(t.dtype)
