"""The delta rule, also with erasure and decay by channel: checks, references in plain PyTorch and fla's kernels."""

from typing import Any

import torch
from torch import Tensor

from seqarch.kernels.chunks import split_chunks
from seqarch.kernels.fla_tuning import fla_recurrence
from seqarch.kernels.op import Backend, Op, wide_heads
from seqarch.kernels.packages import check_gated_gradients
from seqarch.kernels.packed import recur
from seqarch.kernels.rwkv import rwkv7_reference
from seqarch.kernels.tensors import (
    Recurred,
    at_least_float32,
    autocast_cast,
    check_sequences,
    default_scale,
    is_tracked,
    state_or_zeros,
)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The delta rule (arXiv 2406.06484), with a decay the gated delta rule (arXiv 2412.06464).

    `S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T` and `o_t = scale * S_t^T q_t`: the decayed state's
    answer to the key is moved towards the value by beta. Keys should have unit length, or the state may grow without
    bound; both papers normalise q and k beforehand.

    Args:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        beta: `[B, T, H]`, how far the state moves: 0 to 1, to 2 with negative eigenvalues.
        log_decay: `[B, T, H]` float32 (float64 for float64 inputs), the logarithm of `a_t`, at most 0; None for
            `a_t = 1`.
        scale: factor on the outputs; None is `K ** -0.5`.
        initial_state: `[rows, H, K, V]`, rows = B or the number of documents; None for zeros.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); the state restarts at each.
        backend: "auto", "reference" or "fla", the kernels of fla-core.

    Returns:
        `o [B, T, H, V]` in the dtype of `q`, or of autocast if it is on, and the final state `[rows, H, K, V]` in
        float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together; a backend that is not installed.
    """
    q, k, v = autocast_cast(q, k, v)
    shapes = {"q [B, T, H, K] same": q, "k [B, T, H, K] same": k, "v [B, T, H, V] same": v, "beta [B, T, H]": beta}
    others = {"log_decay [B, T, H] wide": log_decay, "initial_state [rows, H, K, V]": initial_state}
    check_sequences({**shapes, **others}, cu_seqlens)
    return DELTA_RULE.run(backend, q, k, v, beta, log_decay, default_scale(scale, q), initial_state, cu_seqlens)


CHUNK_SIZE = 64


def delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, scale: float, state: Any, cu_seqlens: Any
) -> Recurred:
    return recur((delta_rule_recurrent, delta_rule_chunked), (q, k, v, beta, log_decay), scale, state, cu_seqlens)


def delta_rule_recurrent(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, initial_state: Tensor | None
) -> Recurred:
    """One step per token; the definition. Arguments as in `delta_rule`, without packed documents and scale."""
    state = state_or_zeros(initial_state, q, k.shape[0], *k.shape[2:], v.shape[3])
    decay = None if log_decay is None else log_decay.exp()
    outputs = []
    for t in range(q.shape[1]):
        if decay is not None:
            state = state * decay[:, t, :, None, None]
        error = v[:, t] - (k[:, t, :, :, None] * state).sum(dim=2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None, :]
        outputs.append((q[:, t, :, :, None] * state).sum(dim=2))
    return torch.stack(outputs, dim=1), state


def delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, initial_state: Tensor | None
) -> Recurred:
    """The delta rule in chunks (arXiv 2406.06484, section 3.2; with decay arXiv 2412.06464, section 3.3).

    Let g be the running sum of the log decay in a chunk that starts at state S. Token i writes `k_i u_i^T` with
    `u_i = beta_i (v_i - exp(g_i) S^T k_i - sum_{j < i} exp(g_i - g_j) (k_i . k_j) u_j)`. This unit triangular system
    is solved for all chunks at once. Only S then goes from chunk to chunk.
    """
    length = q.shape[1]
    size = min(length, CHUNK_SIZE)
    state = state_or_zeros(initial_state, q, k.shape[0], *k.shape[2:], v.shape[3])
    q, k, v, b = (split_chunks(t, size) for t in (q, k, v, beta[..., None]))
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.mT).masked_fill(~lower, 0)
    system = b * (k @ k.mT)  # its strictly lower triangle is what the solver reads
    writes, reads, keys, queries = b * v, b * k, k, q
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
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2), state


def _obstacle(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, scale: float, state: Tensor | None, *_: Any
) -> str | None:
    """Why fla's kernels cannot take heads of these sizes, or None."""
    differentiates = is_tracked(q, k, v, beta, log_decay, state)
    if _takes_steps(q, log_decay, differentiates):
        return None
    if reason := wide_heads(q):
        return reason
    if differentiates and (k.shape[-1], v.shape[-1]) == (32, 64):
        # seen on an H200 with fla 0.6.0, in chunk_bwd_kernel_dqkwg; every later call of the process fails too
        return "its backward pass accesses illegal memory with keys of 32 and values of 64 dims: take other heads"
    return None


@torch.compiler.disable()
def _fla(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, scale: float, state: Any, cu_seqlens: Any
) -> Recurred:
    """Run fla's kernels (fla-core 0.6). One token without gradients takes the kernels for single steps.

    The chunked kernel without decay takes only half precision, so float32 without decay runs the steps too, which are
    exact and differentiable but slow for long sequences.
    """
    options: dict[str, Any] = {"q": q, "k": k, "v": v, "beta": beta, "initial_state": state, "cu_seqlens": cu_seqlens}
    differentiates = is_tracked(q, k, v, beta, log_decay, state)
    step = _takes_steps(q, log_decay, differentiates)
    if log_decay is None:
        return fla_recurrence("delta_rule", scale=scale, step=step, **options)
    if differentiates:
        check_gated_gradients(q.device)
    return fla_recurrence("gated_delta_rule", g=log_decay, scale=scale, step=step, **options)


def _takes_steps(q: Tensor, log_decay: Tensor | None, differentiates: bool) -> bool:
    """Whether fla's kernels for single steps run."""
    return (q.shape[1] == 1 and not differentiates) or (log_decay is None and q.dtype == torch.float32)


DELTA_RULE = Op("delta_rule", delta_rule_reference, (Backend("fla", _fla, "fla", obstacle=_obstacle),), fuses=True)


def gated_delta_rule2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    erase: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence of Gated DeltaNet-2 (arXiv 2605.22791), which erases channels of a key apart from each other.

        S_t = (I - k_t (e_t * k_t)^T) diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T,   o_t = scale * S_t^T q_t

    The paper's write gate is a factor of the values, so `v` holds it already. With `e_t` one number per head and a
    write gate equal to it, this is Kimi Delta Attention; if the decay is one number too, the gated delta rule.

    Args:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`, of unit length, or the state may grow without bound.
        v: `[B, T, H, V]`, times the write gate.
        log_decay: `[B, T, H, K]` float32 (float64 for float64 inputs), at most 0.
        erase: `[B, T, H, K]`, the erase gate e: 0 to 1, to 2 with negative eigenvalues.
        scale: factor on the outputs; None is `K ** -0.5`.
        initial_state: `[rows, H, K, V]`, rows = B or the number of documents; None for zeros.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); the state restarts at each.
        backend: "auto", "reference" or "fla", the kernels of fla-core.

    Returns:
        `o [B, T, H, V]` in the dtype of `v`, or of autocast if it is on, and the final state `[rows, H, K, V]` in
        float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together; a backend that is not installed.
    """
    q, k, v, erase = autocast_cast(q, k, v, erase)
    keys = {f"{name} [B, T, H, K] same": t for name, t in (("q", q), ("k", k), ("erase", erase))}
    keys |= {"log_decay [B, T, H, K] wide": log_decay, "v [B, T, H, V] same": v}
    keys |= {"initial_state [rows, H, K, V]": initial_state}
    check_sequences(keys, cu_seqlens)
    scale = default_scale(scale, q)
    return GATED_DELTA_RULE2.run(backend, q, k, v, log_decay, erase, scale, initial_state, cu_seqlens)


def gated_delta_rule2_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, erase: Tensor, scale: float, state: Any, cu_seqlens: Any
) -> Recurred:
    """As `gated_delta_rule2`: RWKV-7's recurrence that looks up `-erase * k` in the decayed state and adds along k."""
    with torch.autocast(q.device.type, enabled=False):
        lookup = -log_decay.exp() * at_least_float32(erase) * at_least_float32(k)
    return rwkv7_reference(q, k, v, log_decay, lookup, k, scale, state, cu_seqlens)


@torch.compiler.disable()
def _fla2(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, erase: Tensor, scale: float, state: Any, cu_seqlens: Any
) -> Recurred:
    """Run fla's kernels (fla-core 0.6), whose write gate is one here. One token without gradients takes a step."""
    options: dict[str, Any] = {"q": q, "k": k, "v": v, "g": log_decay, "b": erase, "w": torch.ones_like(v)}
    step = q.shape[1] == 1 and not is_tracked(q, k, v, log_decay, erase, state)
    return fla_recurrence("gdn2", scale=scale, step=step, initial_state=state, cu_seqlens=cu_seqlens, **options)


GATED_DELTA_RULE2 = Op(
    "gated_delta_rule2", gated_delta_rule2_reference, (Backend("fla", _fla2, "fla", obstacle=wide_heads),), fuses=True
)
