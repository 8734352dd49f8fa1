"""The recurrence of Mamba-2 in plain PyTorch: token by token, and in chunks with matrix products.

`S_t = exp(g_t) S_{t-1} + B_t x_t^T`, `y_t = S_t^T C_t` for each head, with `x` already scaled by its step and `g <= 0`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels.blocks import expand_heads
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import Recurred, at_least_float32

CHUNK = 64
"""Tokens per chunk: products inside a chunk then cost about as much as products with the state."""


def ssd_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Recurred:
    """As `ssd`, computed at least in float32."""
    dtype = x.dtype
    x, log_decay = scaled_inputs(x, dt, A, log_decay)

    def run(x: Tensor, log_decay: Tensor | None, B: Tensor, C: Tensor, state: Tensor | None) -> Recurred:
        step = ssd_recurrent if x.shape[1] == 1 else ssd_chunked
        return step(at_least_float32(x), log_decay, at_least_float32(B), at_least_float32(C), state)

    with torch.autocast(x.device.type, enabled=False):
        y, state = each_document(run, (x, log_decay, B, C), initial_state, cu_seqlens)
    return y.to(dtype), state


def scaled_inputs(x: Tensor, dt: Tensor, A: Tensor | None, log_decay: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`dt x`, and the logarithms of the decays in float32 or more; None for no decay."""
    with torch.autocast(x.device.type, enabled=False):
        if A is not None:
            log_decay = dt * at_least_float32(A)
        elif log_decay is not None:
            log_decay = at_least_float32(log_decay)
        return (x * dt.unsqueeze(-1)).to(x.dtype), log_decay


def ssd_recurrent(x: Tensor, log_decay: Tensor | None, B: Tensor, C: Tensor, initial_state: Tensor | None) -> Recurred:
    """One step per token: the definition."""
    heads = x.shape[2]
    B, C = expand_heads(B, heads), expand_heads(C, heads)
    state = x.new_zeros(x.shape[0], heads, B.shape[3], x.shape[3]) if initial_state is None else initial_state
    outputs = []
    for t in range(x.shape[1]):
        if log_decay is not None:
            state = log_decay[:, t].exp()[..., None, None] * state
        state = state + B[:, t].unsqueeze(-1) * x[:, t].unsqueeze(-2)
        outputs.append((C[:, t].unsqueeze(-1) * state).sum(-2))  # no product: a compiler fuses it with the update
    return torch.stack(outputs, dim=1), state


def ssd_chunked(x: Tensor, log_decay: Tensor | None, B: Tensor, C: Tensor, initial_state: Tensor | None) -> Recurred:
    """Chunk by chunk with matrix products (arXiv 2405.21060, section 6).

    Every exponent is a sum of log decays over a stretch of tokens, so none is positive. The R heads of each of the G
    groups are columns of one product wherever they share the other factor.
    """
    length, heads = x.shape[1:3]
    groups = B.shape[2]
    L = min(CHUNK, length)
    x = _chunks(x, L).unflatten(3, (groups, heads // groups)).transpose(2, 3)  # [b, M, G, L, R, P]
    B, C = (_chunks(t, L).transpose(2, 3) for t in (B, C))  # [b, M, G, L, N]
    weights = (C @ B.transpose(-1, -2)).unsqueeze(3)  # [b, M, G, 1, L, L]
    if log_decay is None:
        reach = passed = None
        weights = weights.tril()
        added = _products(B, x)
    else:
        total, rest = _running_sum(_by_head(_chunks(log_decay, L), groups))  # [b, M, G or 1, R or 1, L]
        causal = x.new_ones(L, L, dtype=torch.bool).tril()
        distance = total.unsqueeze(-1) - total.unsqueeze(-2) + (rest.unsqueeze(-1) - rest.unsqueeze(-2))
        weights = weights * distance.masked_fill(~causal, float("-inf")).exp()
        left = (total[..., -1:] - total).exp().transpose(-1, -2)[..., None]
        added = _products(B, x * left)
        passed = total[..., -1].exp()[:, :, :, None, :, None]
        reach = total.exp().transpose(-1, -2)[..., None]
    before, state = _pass_states(added, passed, initial_state)
    carried = (C @ before.flatten(-2)).view_as(x)
    y = (weights @ x.transpose(-2, -3)).transpose(-2, -3)
    y = y + (carried if reach is None else carried * reach)
    return y.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :length], state.transpose(2, 3).flatten(1, 2)


def _products(B: Tensor, x: Tensor) -> Tensor:
    """What each chunk adds to the state, `[b, M, G, N, R, P]`."""
    return (B.transpose(-1, -2) @ x.flatten(-2)).unflatten(-1, x.shape[-2:])


def _pass_states(added: Tensor, passed: Tensor | None, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state before each chunk, `[b, M, G, N, R, P]`, and after the last, `[b, G, N, R, P]`."""
    if initial_state is None:
        state = torch.zeros_like(added[:, 0])
    else:
        state = initial_state.unflatten(1, (added.shape[2], added.shape[4])).transpose(2, 3)
    before = []
    for chunk in range(added.shape[1]):
        before.append(state)
        state = (state if passed is None else passed[:, chunk] * state) + added[:, chunk]
    return torch.stack(before, dim=1), state


def _running_sum(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """The running sum along the last dimension and what its rounding left out.

    The caller takes differences of large sums. Without the rest, a strong decay would blur the weak decays after it.
    """
    exact = log_decay.cumsum(-1, dtype=torch.float64)
    total = exact.to(log_decay.dtype)
    return total, (exact - total).to(log_decay.dtype).detach()


def _by_head(log_decay: Tensor, groups: int) -> Tensor:
    """`[b, M, L, H or 1]` as `[b, M, G or 1, R or 1, L]`."""
    heads = log_decay.shape[3]
    return log_decay.unflatten(3, (groups if heads > 1 else 1, -1)).permute(0, 1, 3, 4, 2)


def _chunks(t: Tensor, size: int) -> Tensor:
    """`[B, T, ...]` as `[B, M, size, ...]`, with zeros behind: they neither decay nor add to the state."""
    missing = -t.shape[1] % size
    if missing:
        t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, missing))
    return t.unflatten(1, (-1, size))
