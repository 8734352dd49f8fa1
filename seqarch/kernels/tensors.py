"""What ops ask of their tensors: dtypes, shapes, options that fit together, and documents packed into one row."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError, unknown

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


def check_shapes(shapes: Mapping[str, Tensor | None], **sizes: int) -> dict[str, int]:
    """Refuse tensors whose shapes differ from those in their names, such as `{"q [B, T, H, K]": q}`.

    A letter means the same size in all of them. A tensor may be None.

    Args:
        shapes: the tensors by name and shape.
        sizes: letters whose size is known.

    Returns:
        The sizes of all letters.
    """
    for text, tensor in shapes.items():
        if tensor is None:
            continue
        name, _, shape = text.partition(" ")
        letters = shape[1:-1].split(", ")
        fits = tensor.dim() == len(letters)
        if not fits or any(sizes.get(letter, size) != size for letter, size in zip(letters, tensor.shape, strict=True)):
            expected = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
            known = "" if f"[{expected}]" == shape else f" = [{expected}]"
            raise UserError(f"{name} must have shape {shape}{known}, not {list(tensor.shape)}")
        sizes.update(zip(letters, tensor.shape, strict=True))
    return sizes


def check_sequences(
    shapes: Mapping[str, Tensor | None], cu_seqlens: Tensor | None, *, same: str = "", wide: str = "", **sizes: int
) -> dict[str, int]:
    """`check_shapes` of sequences, the first of which is `[B, T, ...]` with T at least 1.

    Their size `rows` is the number of states: the documents of `cu_seqlens` (see `check_packed`), or B without it.
    `same` and `wide` are names of tensors for `check_dtypes`, with spaces between them.
    """
    first = next(iter(shapes.values()))
    assert first is not None
    rows = 0 if first.dim() == 0 else first.shape[0]
    if cu_seqlens is not None and cu_seqlens.dim() == 1:
        rows = cu_seqlens.shape[0] - 1
    sizes = check_shapes(shapes, **sizes, rows=rows)
    for letter, size in sizes.items():
        if size < 1 and letter not in ("B", "rows"):
            raise UserError(f"{'the sequence is empty: ' if letter == 'T' else ''}{letter} must be at least 1")
    check_packed(cu_seqlens, first)
    if same:
        named = {text.partition(" ")[0]: tensor for text, tensor in shapes.items()}
        check_dtypes({name: named[name] for name in wide.split()}, **{name: named[name] for name in same.split()})
    return sizes


def check_dtypes(wide: Mapping[str, Tensor | None] | None = None, **tensors: Tensor | None) -> None:
    """Refuse tensors that do not share one floating-point dtype and device. A tensor may be None.

    Args:
        wide: tensors that are float32 where the others are narrower.
        tensors: the others, by name.
    """
    present = {name: t for name, t in tensors.items() if t is not None}
    first = next(iter(present.values()))
    if len({(t.dtype, t.device) for t in present.values()}) > 1 or not first.is_floating_point():
        *names, last = present
        who = f"{', '.join(names)} and {last} must share one" if names else f"{last} must have a"
        found = [(t.dtype, str(t.device)) for t in present.values()]
        raise UserError(f"{who} floating-point dtype and device, not {found}")
    dtype = torch.promote_types(first.dtype, torch.float32)
    for name, t in (wide or {}).items():
        if t is not None and (t.dtype != dtype or t.device != first.device):
            raise UserError(
                f"{name} must be {dtype} on {first.device} for values of {first.dtype}, not {t.dtype} on {t.device}"
            )


def check_qkv(q: Tensor, k: Tensor, v: Tensor | None = None, *, suffix: str = "") -> None:
    """Require `q [B, Tq, H, D]`, `k` and `v` `[B, Tk, HK, D]` with `Tq <= Tk` and `HK` dividing `H`.

    `suffix` is what the names of k and v end with.
    """
    names = f"k{suffix}", f"v{suffix}"
    check_shapes({"q [B, Tq, H, D]": q, f"{names[0]} [B, Tk, HK, D]": k, f"{names[1]} [B, Tk, HK, D]": v})
    check_shared(q.shape[2], "query heads", k.shape[2], "key heads")
    if not 1 <= q.shape[1] <= k.shape[1]:
        raise UserError(
            f"queries are the last of the keys' positions: 1 <= Tq <= Tk, not Tq = {q.shape[1]} and Tk = {k.shape[1]}"
        )
    check_dtypes(None, q=q, **dict(zip(names, (k, v), strict=True)))


def check_shared(heads: int, name: str, groups: int, of: str) -> None:
    """Refuse `heads` that are not the same number for each of the `groups`."""
    if heads % groups:
        raise UserError(f"{heads} {name} cannot share {groups} {of} evenly: give a divisor")


def check_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float | None) -> float:
    """Check one query per sequence with cached keys, and return the factor on the scores.

    Tensors are `q [B, 1, H, D]`, caches `[B, capacity, HK, D]` and `lengths [B]` int32. They may not ask for
    gradients.
    """
    if is_tracked(q, k_cache, v_cache):
        raise UserError("decoding has no gradient: call it under torch.no_grad(), or use the op for whole sequences")
    check_qkv(q, k_cache, v_cache, suffix="_cache")
    check_shapes({"q [B, 1, H, D]": q, "lengths [B]": lengths}, **{"1": 1})
    if lengths.dtype != torch.int32 or lengths.device != k_cache.device:
        raise UserError(f"lengths must be int32 on {k_cache.device}, not {lengths.dtype} on {lengths.device}")
    return default_scale(scale, q)


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    scale: float | None,
    cu_seqlens: Tensor | None,
    *,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
) -> float:
    """Check the tensors and options of attention, and return the factor on the scores."""
    check_qkv(q, k, v)
    check_packed(cu_seqlens, k)
    if window is not None and window < 1:
        raise UserError(f"window must be at least 1 (the query's own position), not {window}")
    check_shapes({"alibi_slopes [H]": alibi_slopes}, H=q.shape[2])
    return default_scale(scale, q)


def default_scale(scale: float | None, q: Tensor) -> float:
    """The factor on the scores: `scale`, or D ** -0.5."""
    if scale is None:
        return q.shape[-1] ** -0.5
    if scale <= 0:
        raise UserError(f"scale must be positive, not {scale}")
    return scale


def check_decay(A: Tensor | None, log_decay: Tensor | None) -> None:
    """Refuse `A` together with `log_decay`."""
    if A is not None and log_decay is not None:
        raise UserError("A and log_decay are two ways to decay: give only one")


def check_choice(kind: str, value: Any, known: tuple[str, ...]) -> None:
    """Refuse a `value` that is not among the `known` ones."""
    if value not in known:
        raise unknown(kind, value, known)


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
