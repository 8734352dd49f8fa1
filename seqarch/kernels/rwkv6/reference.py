"""RWKV-6's recurrence in plain PyTorch: step by step, and in chunks."""

from functools import partial

import torch
from torch import Tensor

from seqarch.kernels.chunks import chunk_length, decayed_products, join_chunks, split_chunks
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import Recurred, at_least_float32, state_or_zeros


def rwkv6_reference(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Recurred:
    """As `rwkv6`, computed at least in float32."""
    op = partial(rwkv6_recurrent if r.shape[1] == 1 else rwkv6_chunked, bonus=at_least_float32(bonus))
    tensors = [at_least_float32(t) for t in (r, k, v, log_decay)]
    with torch.autocast(r.device.type, enabled=False):
        o, state = each_document(op, tensors, initial_state, cu_seqlens)
        return (scale * o).to(v.dtype), state


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
