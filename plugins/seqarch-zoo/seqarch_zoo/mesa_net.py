"""MesaNet (arXiv 2506.05233): each output solves a regularised least-squares problem over all tokens so far.

Layer and initial values follow the authors' code in flash-linear-attention, fla/layers/mesa_net.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count, Interval
from seqarch.kernels import Backend, Op, kernels_of
from seqarch.kernels.chunks import chunk_length, join_chunks, split_chunks
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import at_least_float32, autocast_cast, check_sequences
from seqarch.mixers.base import Scale, init_linear, is_fused, size_heads, undecayed
from seqarch.mixers.recurrent import Projected, RecurrentMixer, RecurrentState
from seqarch.mixers.short_convolution import Kernel, ShortConvolution, other_backend

CHUNK_SIZE = 64
NORM_EPS = 1e-5
CG_EPS = 1e-5
"""Keeps the steps of conjugate gradients finite once they have converged."""
States = tuple[Tensor, Tensor]
Solve = Callable[["Gram", Tensor, int], Tensor]
Carry = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


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
        backend: "auto", "reference" or "triton".

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
    solve: Solve | None = None,
    carry_on: Carry | None = None,
    smallest: int = 1,
) -> tuple[Tensor, States]:
    size = chunk_length(max(q.shape[1], smallest), CHUNK_SIZE)
    steps = {"solve": solve or conjugate_gradients, "carry_on": carry_on or carry}
    run = partial(_chunked, regulariser=regulariser, cg_steps=cg_steps, size=size, **steps)
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
    size: int,
    solve: Solve,
    carry_on: Carry,
) -> tuple[Tensor, States]:
    """In chunks. G_t is only multiplied with vectors, through the state before the chunk and the keys inside it."""
    with torch.autocast(q.device.type, enabled=False):
        dtype, length = v.dtype, q.shape[1]
        q, k, v, g, b = (
            split_chunks(at_least_float32(t), size) for t in (q, k, v, log_decay[..., None], beta[..., None])
        )
        g = g.cumsum(dim=-2)
        lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        ratio = (g - g.mT).masked_fill(~lower, -math.inf).exp() * b.mT
        passed, to_end = g.exp(), (g[..., -1:, :] - g).exp() * b
        written = (k * to_end).mT @ torch.cat((k, v), dim=-1)
        if initial_state is None:
            initial = written.new_zeros(written[:, :, 0].shape)
        else:
            initial = torch.cat(initial_state, dim=-1).to(k.dtype)
        states, last = carry_on(written, passed[..., -1:, :], initial)
        (before, sums), final = (t.split([k.shape[-1], v.shape[-1]], dim=-1) for t in (states, last))
        x = solve(Gram(k, ratio, passed, before, regulariser[:, None, None].to(q.dtype)), q, cg_steps)
        o = (x * passed) @ sums + ((x @ k.mT) * ratio) @ v
        return join_chunks(o, length).to(dtype), (final[0].contiguous(), final[1].contiguous())


class Gram(NamedTuple):
    """`G_t + diag(regulariser)` of the tokens of each chunk, as what its products with vectors need."""

    k: Tensor
    """`[B, H, N, C, K]`."""
    ratio: Tensor
    """Step sizes and decays between the tokens of a chunk, `[B, H, N, C, C]`."""
    passed: Tensor
    """Decays since the start of the chunk, `[B, H, N, C, 1]`."""
    before: Tensor
    """G before the chunk, `[B, H, N, K, K]`."""
    regulariser: Tensor
    """`[H, 1, 1, K]`."""

    def times(self, p: Tensor) -> Tensor:
        """The product with a vector for each token, `[B, H, N, C, K]`."""
        inside = ((p @ self.k.mT) * self.ratio) @ self.k
        return (p * self.passed) @ self.before + inside + self.regulariser * p


def carry(written: Tensor, passed: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """The states before the chunks, `[B, H, N, K, V]`, and the one after the last, from what each chunk writes.

    Args:
        written: `[B, H, N, K, V]`.
        passed: the decay of each chunk `[B, H, N, 1, 1]`.
        initial: `[B, H, K, V]`.
    """
    states, state = [], initial
    for new, decay in zip(written.unbind(2), passed.unbind(2), strict=True):
        states.append(state)
        state = decay * state + new
    return torch.stack(states, dim=2), state


def conjugate_gradients(gram: Gram, right: Tensor, steps: int) -> Tensor:
    """Conjugate gradients: x `[B, H, N, C, K]` with `gram.times(x) = right`, starting at zero."""
    x, r = torch.zeros_like(right), right
    p, squared = r, (r * r).sum(dim=-1, keepdim=True)
    for _ in range(steps):
        moved = gram.times(p)
        alpha = squared / ((p * moved).sum(dim=-1, keepdim=True) + CG_EPS)
        x, r = x + alpha * p, r - alpha * moved
        squared, last = (r * r).sum(dim=-1, keepdim=True), squared
        p = r + squared / (last + CG_EPS) * p
    return x


def _solve(gram: Gram, right: Tensor, steps: int) -> Tensor:
    """The solution by Triton, and its gradient by a second system: none of the steps is kept in memory."""
    from seqarch_zoo.mesa_triton import solve, solved_gradient

    with torch.no_grad():
        x = solve(*gram, right, steps)
    return x + solved_gradient(*(t.detach() for t in gram), right - gram.times(x), steps)


def _triton(*inputs: Any) -> tuple[Tensor, States]:
    from seqarch_zoo.mesa_triton import carry

    run = partial(_reference, *inputs, solve=_solve, carry_on=carry, smallest=16)  # tl.dot's
    return run() if inputs[-1] is None else _outside_graphs(run)


@torch.compiler.disable()  # a graph would contain every document separately
def _outside_graphs(run: Callable[[], tuple[Tensor, States]]) -> tuple[Tensor, States]:
    return run()


def _obstacle(q: Tensor, *others: Any) -> str | None:
    return f"it takes heads of at most 128 dims, not {q.shape[-1]}" if q.shape[-1] > 128 else None


MESA_NET = Op("mesa_net", _reference, (Backend("triton", _triton, "triton", obstacle=_obstacle),))


class MesaNet(RecurrentMixer):
    """Linear attention whose queries are first divided by the regularised Gram matrix of the keys.

    Args:
        n_heads: heads H.
        head_dim: size of each head's queries, keys and values; `d_model / n_heads` unless given.
        conv_size: tokens that the short convolution of queries and keys sees.
        cg_steps: steps of conjugate gradients.
        lowest_regulariser: lower bound of the regulariser.
        backend: "auto", "reference" or "triton"; with "reference" the convolution is in PyTorch too.
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
        n_heads: Count,
        head_dim: Count | None = None,
        conv_size: Kernel = 4,
        cg_steps: Count = 30,
        lowest_regulariser: Annotated[float, Interval(0, 1, "()")] = 0.25,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, backend)
        MESA_NET.check(backend)
        self.n_heads, self.head_dim = n_heads, size_heads(d_model, n_heads, head_dim)
        square = (n_heads, self.head_dim, self.head_dim)
        self.state_shape = (square, square)
        self.cg_steps, self.lowest = cg_steps, lowest_regulariser
        width = n_heads * self.head_dim
        self.qk = nn.Linear(d_model, 2 * width, bias=False)
        is_fused(self.qk, width, width)
        self.value = nn.Linear(d_model, width, bias=False)
        self.convolution = ShortConvolution(2 * width, conv_size, backend=other_backend(backend))
        self.steps = nn.Linear(d_model, 2 * n_heads)
        is_fused(self.steps, n_heads, n_heads)
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
