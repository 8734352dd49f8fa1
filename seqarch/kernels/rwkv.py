"""The recurrences of RWKV-5, RWKV-6 and RWKV-7: checks, references in plain PyTorch and fla's kernels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels.chunks import chunk_length, decayed_products, join_chunks, split_chunks
from seqarch.kernels.fla_tuning import fla_recurrence
from seqarch.kernels.op import Backend, Op, wide_heads
from seqarch.kernels.packed import recur
from seqarch.kernels.tensors import Recurred, at_least_float32, autocast_cast, check_sequences, state_or_zeros


def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence of RWKV-6, and of RWKV-5 with decays that do not depend on the position (arXiv 2404.05892).

        o_t = scale * r_t (S_{t-1} + diag(bonus) k_t v_t^T),   S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T

    Args:
        r: receptances `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        log_decay: logarithms of the decays `[B, T, H, K]`, at most zero and finite, float32 (float64 for float64
            inputs); may be an expanded view.
        bonus: `[H, K]`, the weight of a token in its own output in place of the decay.
        scale: factor on the outputs; RWKV has none.
        initial_state: `[rows, H, K, V]`, rows = B or the number of packed documents; zeros when None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1).
        backend: "auto", "reference" or "fla", the kernels of fla-core.

    Returns:
        Outputs `[B, T, H, V]` in the dtype of `v`, or of autocast if it is on, and the final state `[rows, H, K, V]`
        in float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    r, k, v = autocast_cast(r, k, v)
    shapes = {"r [B, T, H, K] same": r, "k [B, T, H, K] same": k, "v [B, T, H, V] same": v}
    shapes |= {"log_decay [B, T, H, K] wide": log_decay}
    shapes |= {"bonus [H, K]": bonus, "initial_state [rows, H, K, V]": initial_state}
    check_sequences(shapes, cu_seqlens)
    return RWKV6.run(backend, r, k, v, log_decay, bonus, scale, initial_state, cu_seqlens)


def rwkv6_reference(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, scale: float, state: Any, cu_seqlens: Any
) -> Recurred:
    """As `rwkv6`, computed at least in float32."""
    forms = [partial(form, bonus=at_least_float32(bonus)) for form in (rwkv6_recurrent, rwkv6_chunked)]
    return recur(forms, (r, k, v, log_decay), scale, state, cu_seqlens)


def rwkv6_recurrent(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None, *, bonus: Tensor
) -> Recurred:
    """One step per token; see `rwkv6`."""
    state = state_or_zeros(initial_state, v, v.shape[0], *k.shape[2:], v.shape[3])
    outputs = []
    for t in range(r.shape[1]):
        update = k[:, t, :, :, None] * v[:, t, :, None, :]
        read = (state + bonus[..., None] * update) * r[:, t, :, :, None]
        outputs.append(read.sum(dim=-2))
        state = log_decay[:, t, :, :, None].exp() * state + update
    return torch.stack(outputs, dim=1), state


def rwkv6_chunked(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None, *, bonus: Tensor
) -> Recurred:
    """In chunks, with matrix products; the state goes from chunk to chunk. See `rwkv6`."""
    state = state_or_zeros(initial_state, v, v.shape[0], *k.shape[2:], v.shape[3])
    own = (r * k * bonus).sum(dim=-1, keepdim=True) * v
    length = r.shape[1]
    C = chunk_length(length)
    r, k, v, log_decay = (split_chunks(t, C) for t in (r, k, v, log_decay))
    inside = decayed_products(r.unsqueeze(-3), k.unsqueeze(-3), log_decay.unsqueeze(-3))
    r = r * inside.before.squeeze(-3).exp()
    k = k * inside.after.squeeze(-3).exp()
    updates = k.transpose(-1, -2) @ v
    decays = inside.total.squeeze(-3).transpose(-1, -2).exp()
    states = []
    for update, decay in zip(updates.unbind(2), decays.unbind(2), strict=True):
        states.append(state)
        state = decay * state + update
    o = inside.products[..., 0, 0, :, :] @ v + r @ torch.stack(states, dim=2)
    return join_chunks(o, length) + own, state


def _fla6(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, scale: float, state: Tensor | None, cu: Any
) -> Recurred:
    step = r.shape[1] == 1 and not torch.is_grad_enabled()
    state = None if state is None else state.float()
    return fla_recurrence(
        "rwkv6", r, k, v, log_decay, bonus.float(), scale=scale, initial_state=state, cu_seqlens=cu, step=step
    )


RWKV6 = Op("rwkv6", rwkv6_reference, (Backend("fla", _fla6, "fla"),), fuses=True)


def rwkv7(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float = 1.0,
    lower_bound: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence of RWKV-7 (arXiv 2503.14456): at each step a decay and a matrix of rank one, then the new token.

        S_t = diag(exp(log_decay_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,   o_t = scale * S_t^T r_t

    The paper writes the transposed state, S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T.

    Args:
        r: receptances `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        log_decay: logarithms of the decays `[B, T, H, K]`, at most zero and finite, float32 (float64 for float64
            inputs).
        a: the direction that is read from the state `[B, T, H, K]`; RWKV-7: minus the normalised key.
        b: the direction in which the result is added `[B, T, H, K]`; RWKV-7: the normalised key times the learning
            rate.
        scale: factor on the outputs; RWKV has none.
        lower_bound: a promise that `log_decay` is never below it; with a bound near zero the CUDA kernels take larger
            chunks.
        initial_state: `[rows, H, K, V]`, rows = B or the number of packed documents; zeros when None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1).
        backend: "auto", "reference" or "fla", the kernels of fla-core.

    Returns:
        Outputs `[B, T, H, V]` in the dtype of `v`, or of autocast if it is on, and the final state `[rows, H, K, V]`
        in float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    r, k, v, a, b = autocast_cast(r, k, v, a, b)
    keys = {f"{name} [B, T, H, K] same": t for name, t in (("r", r), ("k", k), ("a", a), ("b", b))}
    others = {"v [B, T, H, V] same": v, "initial_state [rows, H, K, V]": initial_state}
    check_sequences({**keys, "log_decay [B, T, H, K] wide": log_decay, **others}, cu_seqlens)
    if lower_bound is not None and lower_bound >= 0:
        raise UserError(f"lower_bound must be below 0, as logarithms of decays are, not {lower_bound}")
    return RWKV7.run(backend, r, k, v, log_decay, a, b, scale, initial_state, cu_seqlens, lower_bound)


def rwkv7_reference(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, scale: float, state: Any, cu: Any, *_: Any
) -> Recurred:
    """As `rwkv7`, computed at least in float32; `lower_bound` is not used."""
    return recur((rwkv7_recurrent, rwkv7_chunked), (r, k, v, log_decay, a, b), scale, state, cu)


def rwkv7_recurrent(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, initial_state: Tensor | None
) -> Recurred:
    """One step per token; see `rwkv7`."""
    r, k, v, log_decay, a, b = (t[..., None] for t in (r, k, v, log_decay, a, b))
    v = v.transpose(-1, -2)
    state = state_or_zeros(initial_state, v, v.shape[0], *k.shape[2:4], v.shape[4])
    outputs = []
    for t in range(r.shape[1]):
        read = (a[:, t] * state).sum(dim=-2, keepdim=True)
        state = log_decay[:, t].exp() * state + b[:, t] * read + k[:, t] * v[:, t]
        outputs.append((r[:, t] * state).sum(dim=-2))
    return torch.stack(outputs, dim=1), state


def rwkv7_chunked(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, initial_state: Tensor | None
) -> Recurred:
    """In chunks, each with matrix products and one triangular system; the state goes on. See `rwkv7`."""
    state = state_or_zeros(initial_state, v, v.shape[0], *k.shape[2:], v.shape[3])
    length = r.shape[1]
    C = chunk_length(length)
    r, k, v, log_decay, a, b = (split_chunks(t, C) for t in (r, k, v, log_decay, a, b))
    # r reads after the step, so the step's own decay lies between it and earlier tokens.
    rows, columns = torch.stack((r * log_decay.exp(), a), dim=-3), torch.stack((k, b), dim=-3)
    inside = decayed_products(rows, columns, log_decay.unsqueeze(-3))
    (r_k, r_b), (a_k, a_b) = (kind.unbind(-3) for kind in inside.products.unbind(-4))
    r_k = r_k + torch.diag_embed((r * k).sum(dim=-1))
    r_b = r_b + torch.diag_embed((r * b).sum(dim=-1))
    r, a = (rows * inside.before.exp()).unbind(-3)
    k, b = (columns * inside.after.exp()).unbind(-3)
    # What a_t finds in the state before its step: found = a S + a_b found + a_k v, S the state before the chunk.
    system = torch.eye(C, dtype=v.dtype, device=v.device) - a_b
    right = torch.cat((a_k @ v, a), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    found_inside, found_before = solved.split((v.shape[-1], a.shape[-1]), dim=-1)
    states, state = _carry(k, b, v, inside.total.squeeze(-3), found_inside, found_before, state)
    found = found_inside + found_before @ states
    o = r @ states + r_k @ v + r_b @ found
    return join_chunks(o, length), state


def _carry(
    k: Tensor, b: Tensor, v: Tensor, total: Tensor, found_inside: Tensor, found_before: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The state before each chunk `[B, H, N, K, V]` and the last one."""
    b = b.transpose(-1, -2)
    updates = k.transpose(-1, -2) @ v + b @ found_inside
    moves = b @ found_before + torch.diag_embed(total.squeeze(-2).exp())
    states = []
    for update, move in zip(updates.unbind(2), moves.unbind(2), strict=True):
        states.append(state)
        state = move @ state + update
    return torch.stack(states, dim=2), state


def _fla7(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, scale: float, state: Any, *rest: Any
) -> Recurred:
    cu_seqlens, lower_bound = rest
    step = r.shape[1] == 1 and not torch.is_grad_enabled()
    options: dict[str, Any] = {"scale": scale, "step": step, "cu_seqlens": cu_seqlens}
    options["initial_state"] = None if state is None else state.float()
    if not step:  # the backward pass would compute a fifth of all kernels' time again, to save memory
        options |= {"lower_bound": lower_bound, "disable_recompute": True}
    return fla_recurrence("rwkv7", r, log_decay, k, v, a, b, **options)


RWKV7 = Op("rwkv7", rwkv7_reference, (Backend("fla", _fla7, "fla", obstacle=wide_heads),), fuses=True)
