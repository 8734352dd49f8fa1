"""FLOP formulas of our operators for `torch.utils.flop_counter`, which cannot look into them.

    from seqarch.kernels.flops import register_all

    register_all()
    with FlopCounterMode(): ...

A counter knows the operators that were registered when it was made. The Triton operators are registered when they are
imported, which is at their first call or in `register_all`.

Formulas take shapes where the operator takes tensors. They count the products that the result needs, two operations
for a multiplication and an addition, as `flops_per_token` of the mixers does. A backward pass counts twice its forward
pass. Scores that it computes again do not count, nor does work on single elements. The values of tensors are not known,
so packed rows count as one document and caches count as full: an upper bound.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = tuple[int, ...]
Formula = Callable[..., int]


def causal_keys(T: int, window: int | None = None) -> int:
    """Keys that the first T queries of a sequence see, added up: all until itself, or the last `window` of them."""
    window = min(window or T, T)
    return window * (window + 1) // 2 + (T - window) * window


def chunks_before(T: int, chunk_size: int, most: int | None = None) -> int:
    """Earlier chunks of the first T queries of a sequence, at most `most` per query, added up."""
    complete, rest = divmod(T, chunk_size)
    limit = complete if most is None else min(complete, most)
    return chunk_size * causal_keys(max(complete - 1, 0), most) + rest * limit


def chunk_keys(T: int, chunk_size: int, remote_chunks: int = 1) -> int:
    """Keys of the own chunk and of the selected ones that the first T queries of a sequence see, added up."""
    complete, rest = divmod(T, chunk_size)
    local = complete * causal_keys(chunk_size) + causal_keys(rest)
    return local + chunk_size * chunks_before(T, chunk_size, remote_chunks)


def last_queries(count: Callable[..., int], q: Shape, k: Shape, *options: Any) -> int:
    """`count(T, *options)` of the last queries of a sequence, for all heads and head dims of `q [B, Tq, H, D]`."""
    B, Tq, H, D = q
    return B * H * D * (count(k[1], *options) - count(k[1] - Tq, *options))


def selected(q: Shape, k: Shape, chunk_size: int, selection: str, *_: Any) -> int:
    """Operations of the selection of chunks: a product with each earlier key, or with each mean key."""
    return 2 * last_queries(chunks_before, q, k, chunk_size) * (chunk_size if selection == "exact" else 1)


def none(*_: Any) -> int:
    """Operations of an operator without products of matrices."""
    return 0


def count(operator: str, formula: Formula) -> None:
    """Let counters use a formula, which takes shapes in place of tensors, for the operator `namespace::name`."""
    namespace, _, name = operator.partition("::")
    target = getattr(getattr(torch.ops, namespace), name)
    register_flop_formula(target)(lambda *shapes, out_shape=None: formula(*shapes))


def register_all() -> None:
    """Import the operators, which registers their formulas. Needs Triton."""
    for path in sorted(Path(__file__).parent.glob("*/triton*.py")):
        importlib.import_module(f"seqarch.kernels.{path.parent.name}.{path.stem}")
