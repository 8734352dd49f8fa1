"""What ops refuse: shapes, dtypes and options that do not fit together."""

from __future__ import annotations

import torch
from torch import Tensor

from seqarch.errors import UserError, unknown
from seqarch.kernels.packed import all_documents


def check_qkv(q: Tensor, k: Tensor, v: Tensor | None = None, *, names: str = "q, k and v") -> None:
    """Refuse anything but `q [B, Tq, H, D]`, `k` and `v` `[B, Tk, HK, D]` with `Tq <= Tk` and `HK` dividing `H`."""
    tensors = (q, k) if v is None else (q, k, v)
    names = names if v is not None else "q and k"
    if any(t.dim() != 4 for t in tensors):
        raise UserError(f"{names} must have four dimensions [B, T, H, D], not {[tuple(t.shape) for t in tensors]}")
    if v is not None and k.shape != v.shape:
        raise UserError(f"k and v must have the same shape, not {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise UserError(f"q and k must agree in batch and head dim, not {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[2] % k.shape[2]:
        raise UserError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key heads evenly: give a divisor")
    if not 1 <= q.shape[1] <= k.shape[1]:
        raise UserError(
            f"queries are the last of the keys' positions: 1 <= Tq <= Tk, not Tq = {q.shape[1]} and Tk = {k.shape[1]}"
        )
    if any(t.dtype != q.dtype or t.device != q.device for t in tensors) or not q.is_floating_point():
        raise UserError(
            f"{names} must share one floating-point dtype and device, not {[(t.dtype, str(t.device)) for t in tensors]}"
        )


def check_decode(q: Tensor, k_cache: Tensor, lengths: Tensor) -> None:
    """Refuse more than one query per sequence, and `lengths` that is not `[B]` int32 on the device of the cache."""
    if q.shape[1] != 1:
        raise UserError(f"decoding takes one query a sequence, q [B, 1, H, D], not {list(q.shape)}")
    if lengths.shape != q.shape[:1] or lengths.dtype != torch.int32 or lengths.device != k_cache.device:
        raise UserError(
            f"lengths must be int32 of shape [B] = [{q.shape[0]}] on {k_cache.device}, "
            f"not {lengths.dtype} of shape {list(lengths.shape)} on {lengths.device}"
        )


def check_cu_seqlens(cu_seqlens: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Refuse `cu_seqlens` that is not `[N + 1]` int32 for one packed row with as many queries as keys."""
    check_packed(cu_seqlens, q)
    if cu_seqlens is not None and q.shape[1] != k.shape[1]:
        raise UserError(f"cu_seqlens needs Tq = Tk, not Tq = {q.shape[1]} and Tk = {k.shape[1]}")


def check_packed(cu_seqlens: Tensor | None, x: Tensor) -> None:
    """Refuse `cu_seqlens` that is not `[N + 1]` int32 for the one packed row of `x [1, T, ...]`.

    Whether it rises from 0 to T is asked only where the answer is at hand, on a CPU outside compiled graphs.
    """
    if cu_seqlens is None:
        return
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.shape[0] < 2:
        raise UserError(
            f"cu_seqlens must be int32 of shape [N + 1], not {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    if x.shape[0] != 1:
        raise UserError(f"cu_seqlens needs B = 1, not B = {x.shape[0]}")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        all_documents(cu_seqlens, x.shape[1])


def check_window(window: int | None) -> None:
    """Refuse a window below one key: a query always sees itself."""
    if window is not None and window < 1:
        raise UserError(f"window must be at least 1 (the query's own position), not {window}")


def check_alibi(alibi_slopes: Tensor | None, q: Tensor) -> None:
    """Refuse slopes that are not one number a query head."""
    if alibi_slopes is not None and alibi_slopes.shape != (q.shape[2],):
        raise UserError(f"alibi_slopes must have shape [H] = [{q.shape[2]}], not {list(alibi_slopes.shape)}")


def default_scale(scale: float | None, q: Tensor) -> float:
    """The factor on the scores: `scale`, or D ** -0.5."""
    if scale is None:
        return q.shape[-1] ** -0.5
    if scale <= 0:
        raise UserError(f"scale must be positive, not {scale}")
    return scale


def check_sequences(keys: dict[str, Tensor], v: Tensor, activations: tuple[str, ...], logs: tuple[str, ...]) -> None:
    """Refuse anything but `keys` of one shape `[B, T, H, K]` with `v [B, T, H, V]`, T at least 1, in fitting dtypes.

    Args:
        keys: tensors as wide as the keys, by name.
        v: the values.
        activations: which of them share the floating-point dtype of `v`.
        logs: which of them are logarithms, float32 or, for float64 values, float64.
    """
    shape = keys["k"].shape
    if v.dim() != 4 or any(t.shape != shape for t in keys.values()) or v.shape[:3] != shape[:3]:
        names = ", ".join(keys)
        shapes = [tuple(t.shape) for t in (*keys.values(), v)]
        raise UserError(f"{names} must have one shape [B, T, H, K] and v [B, T, H, V], not {shapes}")
    if shape[1] < 1:
        raise UserError("the sequence is empty: T must be at least 1")
    if not v.is_floating_point() or any(keys[name].dtype != v.dtype for name in activations):
        dtypes = [keys[name].dtype for name in activations]
        raise UserError(f"{', '.join(activations)} and v must share one floating-point dtype, not {dtypes}, {v.dtype}")
    wide = torch.promote_types(v.dtype, torch.float32)
    for name in logs:
        if keys[name].dtype != wide:
            raise UserError(f"{name} must be {wide} for values of {v.dtype}, not {keys[name].dtype}")
    if any(t.device != v.device for t in keys.values()):
        raise UserError(f"{', '.join(keys)} and v must be on one device")


def check_initial_state(state: Tensor | None, k: Tensor, cu_seqlens: Tensor | None, sizes: dict[str, int]) -> None:
    """Refuse a state that is not `[N, H, ...]`, N being the batch size or the number of documents.

    Args:
        state: the state, or None.
        k: `[B, T, H, K]`.
        cu_seqlens: `[N + 1]` borders of packed documents.
        sizes: of the dimensions after the heads, by what they are.
    """
    if state is None:
        return
    N = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expected = [N, k.shape[2], *sizes.values()]
    if list(state.shape) != expected:
        names = ", ".join(("N", "H", *sizes))
        raise UserError(f"initial_state must have shape [{names}] = {expected}, not {list(state.shape)}")


def check_choice(kind: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a `value` that is not among the `known` ones."""
    if value not in known:
        raise unknown(kind, value, known)
