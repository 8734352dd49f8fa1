"""The state space dual op: checks, references in plain PyTorch and other packages' kernels."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.errors import refused
from seqarch.kernels.blocks import expand_heads
from seqarch.kernels.fla_tuning import fla_recurrence
from seqarch.kernels.op import Backend, Op
from seqarch.kernels.packages import check_gated_gradients, mamba_ssm_function
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import (
    Recurred,
    at_least_float32,
    autocast_cast,
    check_decay,
    check_sequences,
    check_shared,
    is_tracked,
)

TRITON_SIZES = (256, 128)
"""Largest N and P that our own kernels hold at once."""
MAMBA_CHUNK = 256
"""Tokens per chunk of mamba-ssm's kernels, as in the published module."""


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba-2, the state space dual (arXiv 2405.21060).

    For each head h, in group h // (H / G), with a state `S [N, P]` that starts at zero:

        S_t = a_t S_{t-1} + dt_t B_t x_t^T,    a_t = exp(dt_t A),    y_t = S_t^T C_t

    Decays and states are kept in float32 (float64 for float64 inputs). Every backend runs a single token in PyTorch.

    Args:
        x: inputs `[B, T, H, P]`.
        dt: steps `[B, T, H]`, positive.
        A: `[H]`, zero or negative; None for `a_t = 1`.
        B: input projections `[B, T, G, N]`, G a divisor of H.
        C: output projections, as `B`.
        log_decay: `ln a_t`, at most 0, in place of `dt_t A`: `[B, T, H]`, or `[B, T, 1]` for all heads.
        initial_state: `[B, H, N, P]`; with `cu_seqlens` one for each document.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); the state restarts at each.
        backend: "auto", "reference", "triton", our CUDA kernels (N up to 256 and P up to 128), "fla", the kernels of
            fla-core, or "mamba_ssm", the authors' Triton kernels, which take neither `log_decay` nor `cu_seqlens`.

    Returns:
        `y [B, T, H, P]` in the dtype of `x`, or of autocast if it is on, without a skip connection, and the final
        state `[B, H, N, P]`.

    Raises:
        UserError: shapes, dtypes or options that do not fit together; a backend that is missing.
    """
    x, B, C = autocast_cast(x, B, C)
    shapes = {"x [B, T, H, P] same": x, "dt [B, T, H]": dt, "B [B, T, G, N] same": B, "C [B, T, G, N] same": C}
    decays = "log_decay [B, T, 1]" if log_decay is not None and log_decay.shape[-1:] == (1,) else "log_decay [B, T, H]"
    shapes |= {"A [H]": A, decays: log_decay, "initial_state [rows, H, N, P]": initial_state}
    check_sequences(shapes, cu_seqlens)
    check_shared(x.shape[2], "heads", B.shape[2], "groups of B and C")
    check_decay(A, log_decay)
    state = None if initial_state is None else at_least_float32(initial_state)
    args = x, at_least_float32(dt), A, B, C, log_decay, state, cu_seqlens
    run = SSD.choose(backend, *args)
    return (ssd_reference if x.shape[1] == 1 and cu_seqlens is None else run)(*args)


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
        return (x * dt.unsqueeze(-1)).to(x.dtype), log_decays(dt, A, log_decay)


def log_decays(dt: Tensor, A: Tensor | None, log_decay: Tensor | None) -> Tensor | None:
    """The logarithms of the decays in float32 or more; None for no decay."""
    if A is not None:
        return dt * at_least_float32(A)
    return None if log_decay is None else at_least_float32(log_decay)


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


def _triton_obstacle(x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, *others: Tensor | None) -> str | None:
    if B.shape[3] > TRITON_SIZES[0] or x.shape[3] > TRITON_SIZES[1]:
        return f"it takes N up to {TRITON_SIZES[0]} and P up to {TRITON_SIZES[1]}, not {B.shape[3]} and {x.shape[3]}"
    return None


def _fla(x: Tensor, dt: Tensor, A: Any, B: Tensor, C: Tensor, log_decay: Any, *others: Any) -> Recurred:
    return by_simple_gla(*scaled_inputs(x, dt, A, log_decay), B, C, *others)


@torch.compiler.disable()
def by_simple_gla(
    x: Tensor, log_decay: Tensor | None, B: Tensor, C: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> Recurred:
    """Outputs and final states for scaled `x` by fla's gated linear attention: queries C, keys B, values x.

    fla's kernel takes one query and one key per value. If one group and one decay serve all heads, the heads become one
    head with long values. Otherwise B and C are repeated for the heads of their group.
    """
    if log_decay is not None and is_tracked(x, log_decay, B, C, state):
        check_gated_gradients(x.device)
    heads = x.shape[2]
    joined = B.shape[2] == 1 and (log_decay is None or log_decay.shape[2] == 1)
    if joined:
        x = x.flatten(2).unsqueeze(2)
        state = None if state is None else state.transpose(1, 2).flatten(2).unsqueeze(1)
    else:
        B, C = expand_heads(B, heads), expand_heads(C, heads)
        log_decay = None if log_decay is None else log_decay.expand(-1, -1, heads)
    g = None if log_decay is None else log_decay.contiguous()
    y, final = fla_recurrence("simple_gla", C, B, x, g, scale=1.0, initial_state=state, cu_seqlens=cu_seqlens)
    if joined:
        y = y.squeeze(2).unflatten(2, (heads, -1))
        final = final.squeeze(1).unflatten(2, (heads, -1)).transpose(1, 2)
    return y, final


@functools.cache
def deterministic_chunk_scan() -> Callable[..., Any]:
    """mamba-ssm's kernels without atomics, by a mode that holds for the whole process.

    The mode also gives each kernel one tile size, but only as it is imported: without one, each process may find
    another one the fastest, and get other bits.
    """
    run = mamba_ssm_function("triton.ssd_combined", "mamba_chunk_scan_combined")
    with refused("backend 'mamba_ssm' needs a mamba-ssm with a deterministic mode, such as 2.3.2", ImportError):
        mode = importlib.import_module("mamba_ssm.utils.determinism")
    mode.set_deterministic_mode(True)
    for file in ("ssd_bmm", "ssd_chunk_state", "ssd_state_passing", "ssd_chunk_scan", "ssd_combined"):
        for kernel in vars(importlib.import_module(f"mamba_ssm.ops.triton.{file}")).values():
            if hasattr(kernel, "configs"):
                kernel.configs = mode.autotune_configs(kernel.configs)
    return run


@torch.compiler.disable()
def by_mamba_ssm(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, _: None, state: Tensor | None, *__: None
) -> Recurred:
    """Call the authors' Triton kernels, which keep states as `[P, N]`."""
    run = deterministic_chunk_scan()
    A = dt.new_zeros(x.shape[2]) if A is None else A.to(dt.dtype)
    state = None if state is None else state.transpose(2, 3).contiguous()
    y, final = run(x, dt, A, B, C, MAMBA_CHUNK, initial_states=state, return_final_states=True)
    return y, final.transpose(2, 3)


def _mamba_ssm_obstacle(*args: Tensor | None) -> str | None:
    _, _, _, _, _, log_decay, _, cu_seqlens = args
    if log_decay is not None:
        return "it takes no log_decay (a decay of its own, apart from the steps)"
    return None if cu_seqlens is None else "it takes no packed documents (cu_seqlens)"


SSD = Op(
    "ssd",
    ssd_reference,
    (
        Backend("triton", "seqarch.kernels.ssd.triton:recur", "triton", obstacle=_triton_obstacle),
        Backend("mamba_ssm", by_mamba_ssm, "mamba_ssm", obstacle=_mamba_ssm_obstacle),
        Backend("fla", _fla, "fla"),
    ),
)
