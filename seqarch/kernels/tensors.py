"""What ops ask of their tensors: dtypes, shapes, options that fit together, and documents packed into one row."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError

Recurred = tuple[Tensor, Tensor]
"""What a recurrence gives: outputs `[B, T, ...]` and the final state."""


def autocast_cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of the surrounding autocast, if any; our operators do not see autocast by themselves."""
    return tuple(t.to(autocast_dtype(t)) for t in tensors)


def autocast_dtype(t: Tensor) -> torch.dtype:
    """The dtype of the surrounding autocast. Without one, or for float64, it is the dtype of `t`."""
    narrows = torch.is_autocast_enabled(t.device.type) and t.dtype != torch.float64
    return torch.get_autocast_dtype(t.device.type) if narrows else t.dtype


def at_least_float32(t: Tensor) -> Tensor:
    """Half precision widened to float32; float32 and float64 as they are."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def softplus(t: Tensor) -> Tensor:
    """`log(1 + exp(t))`; torch.compile gives the gradient of PyTorch's function wrong strides."""
    return torch.logaddexp(t, torch.zeros_like(t))


def state_or_zeros(initial_state: Tensor | None, like: Tensor, *shape: int) -> Tensor:
    """The state, or zeros of `shape`, at least in float32 and as wide as `like`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return like.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)


def is_tracked(*tensors: Tensor | None) -> bool:
    """Whether gradients will flow to one of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def check_shapes(
    shapes: Mapping[str, Tensor | None], least: Mapping[str, int] | None = None, **sizes: int
) -> dict[str, int]:
    """Refuse tensors that differ from their names, which say shape and dtype: `{"q [B, T, H, K] same": q}`.

    A letter means the same size in all of them. After the shape stands the dtype where it matters. That is int32,
    int64, or "float" for any floating-point dtype. "same" is the dtype of the first tensor, "wide" the wider one of
    that and float32. With a dtype, a tensor is on the device of the first. A tensor may be None.

    Args:
        shapes: the tensors by name.
        least: the least size of a letter; it is 1 for letters that are not here.
        sizes: letters whose size is known.

    Returns:
        The sizes of all letters.
    """
    first = next(t for t in shapes.values() if t is not None)
    dtypes: dict[str, Any] = {"int32": torch.int32, "int64": torch.int64}
    dtypes["wide"] = torch.promote_types(first.dtype, torch.float32)
    dtypes["same"] = first.dtype if first.is_floating_point() else "floating-point"
    for text, tensor in shapes.items():
        if tensor is None:
            continue
        name, _, rest = text.partition(" ")
        shape, kind = rest[: rest.index("]") + 1], rest[rest.index("]") + 2 :]
        dtypes["float"] = tensor.dtype if tensor.is_floating_point() else "floating-point"
        letters = shape[1:-1].split(", ")
        fits = tensor.dim() == len(letters)
        if not fits or any(sizes.get(letter, size) != size for letter, size in zip(letters, tensor.shape, strict=True)):
            expected = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
            known = "" if f"[{expected}]" == shape else f" = [{expected}]"
            raise UserError(f"{name} must have shape {shape}{known}, not {list(tensor.shape)}")
        sizes.update(zip(letters, tensor.shape, strict=True))
        for letter in letters:
            if sizes[letter] < (enough := (least or {}).get(letter, 1)):
                raise UserError(f"{letter} must be at least {enough} in {name} {shape}, not {sizes[letter]}")
        if kind and (tensor.dtype != dtypes[kind] or tensor.device != first.device):
            found = f"{tensor.dtype} on {tensor.device}"
            raise UserError(f"{name} must be of dtype {dtypes[kind]} on {first.device}, not {found}")
    return sizes


def check_sequences(shapes: Mapping[str, Tensor | None], cu_seqlens: Tensor | None, **sizes: int) -> dict[str, int]:
    """`check_shapes` of sequences, the first of which is `[B, T, ...]`; there may be no sequence, B = 0.

    Their size `rows` is the number of states: the documents of `cu_seqlens` (see `check_packed`), or B without it.
    """
    first: Any = next(iter(shapes.values()))
    rows = first.shape[0] if first.dim() else 0
    if cu_seqlens is not None and cu_seqlens.dim() == 1:
        rows = cu_seqlens.shape[0] - 1
    sizes = check_shapes(shapes, {"B": 0, "rows": 0}, **sizes, rows=rows)
    check_packed(cu_seqlens, first)
    return sizes


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor | None, more: Mapping[str, Tensor | None], suffix: str = "", **sizes: int
) -> None:
    """Require `q [B, Tq, H, D]`, `k` and `v` `[B, Tk, HK, D]` with `Tq <= Tk` and `HK` dividing `H`.

    `more` are further tensors by name, as of `check_shapes`; `suffix` is what the names of k and v end with.
    """
    cached = {f"k{suffix} [B, Tk, HK, D] same": k, f"v{suffix} [B, Tk, HK, D] same": v}
    check_shapes({"q [B, Tq, H, D] same": q, **cached, **more}, {"B": 0}, **sizes)
    check_shared(q.shape[2], "query heads", k.shape[2], "key heads")
    if q.shape[1] > k.shape[1]:
        raise UserError(f"queries are the last of the keys' positions: Tq = {q.shape[1]} is above Tk = {k.shape[1]}")


def check_shared(heads: int, name: str, groups: int, of: str) -> None:
    """Refuse `heads` that are not the same number for each of the `groups`."""
    if groups < 1 or heads % groups:
        raise UserError(f"{heads} {name} cannot share {groups} {of} evenly: give a divisor")


def check_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, alibi_slopes: Tensor | None = None
) -> None:
    """Check one query per sequence with cached keys.

    Tensors are `q [B, 1, H, D]`, caches `[B, capacity, HK, D]`, `lengths [B]` int32 and `alibi_slopes [H]`. They may
    not ask for gradients.
    """
    if is_tracked(q, k_cache, v_cache):
        raise UserError("decoding has no gradient: call it under torch.no_grad(), or use the op for whole sequences")
    check_qkv(q, k_cache, v_cache, {"lengths [B] int32": lengths, "alibi_slopes [H]": alibi_slopes}, "_cache", Tq=1)


def check_attention(
    q: Tensor, k: Tensor, v: Tensor | None, cu_seqlens: Tensor | None, alibi_slopes: Tensor | None = None
) -> None:
    """Check the tensors of attention: as `check_qkv`, `check_packed` and `alibi_slopes [H]`."""
    check_qkv(q, k, v, {"alibi_slopes [H]": alibi_slopes})
    check_packed(cu_seqlens, k)


def default_scale(scale: float | None, q: Tensor) -> float:
    """The factor on the scores: `scale`, or D ** -0.5."""
    if scale is not None and scale <= 0:
        raise UserError(f"scale must be positive, not {scale}")
    return q.shape[-1] ** -0.5 if scale is None else scale


def check_decay(A: Tensor | None, log_decay: Tensor | None) -> None:
    """Refuse `A` together with `log_decay`."""
    if A is not None and log_decay is not None:
        raise UserError("A and log_decay are two ways to decay: give only one")


def all_documents(cu_seqlens: Tensor, length: int) -> list[tuple[int, int]]:
    """(start, stop) of each document, empty ones included; reads `cu_seqlens` on the host."""
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != length or any(a > b for a, b in itertools.pairwise(borders)):
        raise UserError(f"cu_seqlens must rise from 0 to T = {length}, not {borders}")
    return list(itertools.pairwise(borders))


def check_packed(cu_seqlens: Tensor | None, x: Tensor, *, part: bool = False) -> None:
    """Refuse `cu_seqlens` that is not `[N + 1]` int32 for the one packed row of `x [1, T, ...]`.

    Whether it rises from 0 to T is checked only if that is cheap: on a CPU, outside compiled graphs. It need not do so
    if `x` is a `part` of the row.
    """
    if cu_seqlens is None:
        return
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.shape[0] < 2:
        raise UserError(f"cu_seqlens must be int32 [N + 1], not {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    if x.shape[0] != 1:
        raise UserError(f"cu_seqlens needs B = 1, not B = {x.shape[0]}")
    if cu_seqlens.device.type == "cpu" and not part and not torch.compiler.is_compiling():
        all_documents(cu_seqlens, x.shape[1])


def bound_documents(cu_seqlens: Tensor, longest: int) -> Tensor:
    """The same borders, of which the caller knows that no document has more than `longest` tokens."""
    cu_seqlens.longest = longest  # pyright: ignore[reportAttributeAccessIssue]
    return cu_seqlens


def longest_document(x: Tensor, cu_seqlens: Tensor | None) -> int | None:
    """The most tokens of a document in `x [B, T, ...]`: T, or what `bound_documents` was told, or None."""
    return x.shape[1] if cu_seqlens is None else getattr(cu_seqlens, "longest", None)


def known_end(x: Tensor, start: int | Tensor, cu_seqlens: Tensor | None) -> int:
    """One more than the largest of `document_positions`, or 0 if the host does not know it."""
    if cu_seqlens is not None:
        return longest_document(x, cu_seqlens) or 0
    return start + x.shape[1] if isinstance(start, int) else 0


def document_positions(x: Tensor, *, start: int | Tensor = 0, cu_seqlens: Tensor | None = None) -> Tensor:
    """Positions `[T]` (int64) of the tokens of `x [B, T, ...]`.

    Args:
        x: any tensor with the sequence in its second dimension.
        start: position of the first token, for a call that continues from a state; `[1]` where the device has it.
        cu_seqlens: `[N + 1]` borders of the documents packed into the row of which `x` is a part; positions restart at
            each.
    """
    positions = torch.arange(x.shape[1], device=x.device) + start
    if cu_seqlens is None:
        return positions
    check_packed(cu_seqlens, x, part=True)
    return positions - cu_seqlens[torch.searchsorted(cu_seqlens, positions, right=True) - 1]
