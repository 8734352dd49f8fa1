"""The recurrence of RWKV-5 and RWKV-6: checks, references in plain PyTorch and fla's kernels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqarch.kernels.chunks import chunk_length, decayed_products, join_chunks, split_chunks
from seqarch.kernels.fla_tuning import fla_recurrence
from seqarch.kernels.op import Backend, Op
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


def rwkv6_reference(r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, *rest: Any) -> Recurred:
    """As `rwkv6`, computed at least in float32."""
    forms = [partial(form, bonus=at_least_float32(bonus)) for form in (rwkv6_recurrent, rwkv6_chunked)]
    return recur(forms, (r, k, v, log_decay), *rest)


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


def _fla(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, scale: float, state: Tensor | None, cu: Any
) -> Recurred:
    step = r.shape[1] == 1 and not torch.is_grad_enabled()
    state = None if state is None else state.float()
    return fla_recurrence(
        "rwkv6", r, k, v, log_decay, bonus.float(), scale=scale, initial_state=state, cu_seqlens=cu, step=step
    )


RWKV6 = Op("rwkv6", rwkv6_reference, (Backend("fla", _fla, "fla"),), fuses=True)
