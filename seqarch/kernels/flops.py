"""What `torch.utils.flop_counter` counts for our operators, which it cannot look into.

    from seqarch.kernels.flops import register_all

    register_all()
    with FlopCounterMode(): ...

A counter knows what was registered when it was made; the Triton operators are imported, and so registered, at their
first call unless `register_all` was called before.

Formulas take shapes where the operator takes tensors. They count the products that the result needs, twice a
multiplication and addition, as `flops_per_token` of the mixers does: scores that a backward pass computes again do not
count. Borders of packed documents lie in a tensor's values, so packed rows count as one document, an upper bound.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = tuple[int, ...]


def count(operator: str, formula: Callable[..., int]) -> None:
    """Count the operator `seqarch::operator`, which must be registered, by `formula(*arguments, out_shape)`."""
    register_flop_formula(getattr(torch.ops.seqarch, operator))(formula)


def register_all() -> None:
    """Import the operators of the Triton kernels, with which their formulas are registered; needs Triton."""
    for module in ("top1_chunk", "top1_element"):
        importlib.import_module(f"seqarch.kernels.{module}.triton")


def add_product(total: Shape, a: Shape, b: Shape, **_: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


def top1_select(q: Shape, k: Shape, chunk_size: int, selection: str, *_: Any, **__: Any) -> int:
    B, Tq, H, D = q
    candidates = chunks_before(k[1], chunk_size) - chunks_before(k[1] - Tq, chunk_size)
    return 2 * B * H * D * candidates * (chunk_size if selection == "exact" else 1)


def top1_chunk_forward(q: Shape, k: Shape, v: Shape, chunks: Shape, chunk_size: int, *_: Any, **__: Any) -> int:
    B, Tq, H, D = q
    return 4 * B * H * D * (chunk_keys(k[1], chunk_size) - chunk_keys(k[1] - Tq, chunk_size))


def top1_chunk_backward(do: Shape, q: Shape, k: Shape, v: Shape, o: Shape, lse: Shape, *rest: Any, **_: Any) -> int:
    chunks, _order, _offsets, chunk_size = rest[:4]
    return 2 * top1_chunk_forward(q, k, v, chunks, chunk_size)


def top1_element_forward(q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    B, Tq, H, D = q
    return 2 * B * H * D * (causal_keys(k[1]) - causal_keys(k[1] - Tq))


def top1_element_backward(do: Shape, q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    return 3 * top1_element_forward(q, k)


def causal_keys(T: int) -> int:
    """Keys that the first T queries of a sequence see, added up."""
    return T * (T + 1) // 2


def chunks_before(T: int, chunk_size: int) -> int:
    """Earlier chunks of the first T queries of a sequence, added up."""
    complete, rest = divmod(T, chunk_size)
    return chunk_size * complete * (complete - 1) // 2 + rest * complete


def chunk_keys(T: int, chunk_size: int) -> int:
    """Keys of the own chunk and of a selected one that the first T queries of a sequence see, added up."""
    complete, rest = divmod(T, chunk_size)
    return complete * causal_keys(chunk_size) + causal_keys(rest) + max(T - chunk_size, 0) * chunk_size
