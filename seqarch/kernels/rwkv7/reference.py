"""RWKV-7's recurrence in plain PyTorch: step by step, and in chunks."""

import torch
from torch import Tensor

from seqarch.kernels.chunks import chunk_length, decayed_products, join_chunks, split_chunks
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import Recurred, at_least_float32, state_or_zeros


def rwkv7_reference(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    lower_bound: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Recurred:
    """As `rwkv7`, computed at least in float32; `lower_bound` is not used."""
    op = rwkv7_recurrent if r.shape[1] == 1 else rwkv7_chunked
    tensors = [at_least_float32(t) for t in (r, k, v, log_decay, a, b)]
    with torch.autocast(r.device.type, enabled=False):
        o, state = each_document(op, tensors, initial_state, cu_seqlens)
        return (scale * o).to(v.dtype), state


def rwkv7_recurrent(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, initial_state: Tensor | None
) -> Recurred:
    """One step per token; see `rwkv7`."""
    r, k, v, log_decay, a, b = (t[..., None] for t in (r, k, v, log_decay, a, b))
    v = v.transpose(-1, -2)
    state = state_or_zeros(initial_state, v, v.shape[0], *k.shape[2:4], v.shape[4])
    outputs = []
    for t in range(r.shape[1]):
        found = (a[:, t] * state).sum(dim=-2, keepdim=True)
        state = log_decay[:, t].exp() * state + b[:, t] * found + k[:, t] * v[:, t]
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
