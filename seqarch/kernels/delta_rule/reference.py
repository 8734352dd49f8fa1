"""The delta rule in plain PyTorch: one step per token, and in chunks with matrix products."""

from typing import Any

import torch
from torch import Tensor

from seqarch.kernels.chunks import split_chunks
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import Recurred, state_or_zeros

CHUNK_SIZE = 64


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Recurred:

    def run(q: Tensor, *others: Any) -> Recurred:
        step: Any = delta_rule_recurrent if q.shape[1] == 1 else delta_rule_chunked
        return step(q, *others, scale)

    return each_document(run, (q, k, v, beta, log_decay), initial_state, cu_seqlens)


def delta_rule_recurrent(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, initial_state: Tensor | None, scale: float
) -> Recurred:
    """One step per token; the definition. Arguments as in `delta_rule`, without packed documents."""
    dtype = q.dtype
    state = state_or_zeros(initial_state, q, k.shape[0], *k.shape[2:], v.shape[3])
    q, k, v, beta = (t.to(state.dtype) for t in (q, k, v, beta))
    decay = None if log_decay is None else log_decay.to(state.dtype).exp()
    outputs = []
    for t in range(q.shape[1]):
        if decay is not None:
            state = state * decay[:, t, :, None, None]
        error = v[:, t] - (k[:, t, :, :, None] * state).sum(dim=2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None, :]
        outputs.append((q[:, t, :, :, None] * state).sum(dim=2))
    return (torch.stack(outputs, dim=1) * scale).to(dtype), state


def delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, initial_state: Tensor | None, scale: float
) -> Recurred:
    """The delta rule in chunks (arXiv 2406.06484, section 3.2; with decay arXiv 2412.06464, section 3.3).

    Let g be the running sum of the log decay in a chunk that starts at state S. Token i writes `k_i u_i^T` with
    `u_i = beta_i (v_i - exp(g_i) S^T k_i - sum_{j < i} exp(g_i - g_j) (k_i . k_j) u_j)`. This unit triangular system
    is solved for all chunks at once. Only S then goes from chunk to chunk.
    """
    with torch.autocast(q.device.type, enabled=False):
        dtype, length = q.dtype, q.shape[1]
        size = min(length, CHUNK_SIZE)
        state = state_or_zeros(initial_state, q, k.shape[0], *k.shape[2:], v.shape[3])
        q, k, v, b = (split_chunks(t.to(state.dtype), size) for t in (q, k, v, beta[..., None]))
        lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        scores = (q @ k.mT).masked_fill(~lower, 0) * scale
        system = b * (k @ k.mT)  # its strictly lower triangle is what the solver reads
        writes, reads, keys, queries = b * v, b * k, k, q * scale
        passed = None
        if log_decay is not None:
            # Sums in float64, so that a strong decay does not blur the weak ones behind it. Exponents are never
            # positive: strong decays underflow to zero, nothing overflows.
            g = split_chunks(log_decay[..., None].double(), size).cumsum(dim=-2)
            since_start, to_end = g.to(state.dtype).exp(), (g[..., -1:, :] - g).to(state.dtype).exp()
            ratio = (g - g.mT).to(state.dtype).masked_fill(~lower, -torch.inf).exp()
            scores, system = scores * ratio, system * ratio
            reads, queries, keys = reads * since_start, queries * since_start, k * to_end
            passed = since_start[..., -1:, :]
        solved = torch.linalg.solve_triangular(system, torch.cat((writes, reads), -1), upper=False, unitriangular=True)
        writes, reads = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
        outputs = []
        for n in range(q.shape[2]):
            u = writes[:, :, n] - reads[:, :, n] @ state
            outputs.append(queries[:, :, n] @ state + scores[:, :, n] @ u)
            state = (state if passed is None else state * passed[:, :, n]) + keys[:, :, n].mT @ u
        return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2).to(dtype), state
