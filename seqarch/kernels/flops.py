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
import math
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


def none(*_: Any, **__: Any) -> int:
    return 0


def twice(forward: Formula, skipped: int) -> Formula:
    """Formula of a backward pass. Its arguments are `skipped` gradients, then the arguments of the forward pass."""
    return lambda *args, **_: 2 * forward(*args[skipped:])


def attention_entropy(q: Shape, k: Shape, scale: float, window: int, *_: Any, **__: Any) -> int:
    return 2 * last_queries(causal_keys, q, k, window)


def top1_chunk_entropy(q: Shape, k: Shape, chunks: Shape, chunk_size: int, *_: Any, **__: Any) -> int:
    return 2 * last_queries(chunk_keys, q, k, chunk_size, *chunks[3:])


def selective_scan(x: Shape, dt: Shape, A: Shape | None, B: Shape, *_: Any, **__: Any) -> int:
    return 4 * math.prod(x) * B[2]


def short_convolution(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[1]


def ssd(x: Shape, log_decay: Shape | None, B: Shape, *_: Any, **__: Any) -> int:
    return 4 * math.prod(x) * B[3]


def top1_select(q: Shape, k: Shape, chunk_size: int, selection: str, *_: Any, **__: Any) -> int:
    return 2 * last_queries(chunks_before, q, k, chunk_size) * (chunk_size if selection == "exact" else 1)


def top1_chunk_forward(q: Shape, k: Shape, v: Shape, chunks: Shape, chunk_size: int, *_: Any, **__: Any) -> int:
    return 4 * last_queries(chunk_keys, q, k, chunk_size, *chunks[3:])


def attention_decode(
    q: Shape, k: Shape, v: Shape, lengths: Shape, scale: float, slopes: Shape | None, hard: bool, **_: Any
) -> int:
    return (2 if hard else 4) * last_queries(causal_keys, q, k)


def top1_chunk_decode(
    q: Shape, k: Shape, v: Shape, lengths: Shape, chunk_size: int, scale: float, means: Shape | None, K: int, **_: Any
) -> int:
    selection = "exact" if means is None else "approx"
    return top1_select(q, k, chunk_size, selection) + top1_chunk_forward(q, k, v, (*q[:3], K), chunk_size)


def flash4_forward(q: Shape, k: Shape, v: Shape, scale: float, window: int | None, *_: Any, **__: Any) -> int:
    return 4 * last_queries(causal_keys, q, k, window)


def top1_element_forward(q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    return 2 * last_queries(causal_keys, q, k)


def top1_element_backward(do: Shape, q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    """Gradients of the distribution, the queries and the keys."""
    return 3 * top1_element_forward(q, k)


def add_product(total: Shape, a: Shape, b: Shape, **_: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


OF_THEIR_NAME = (
    *(add_product, attention_decode, attention_entropy, selective_scan, top1_chunk_decode, top1_chunk_entropy),
    *(top1_chunk_forward, top1_element_backward, top1_element_forward, top1_select),
)
"""Formulas of the operators that are called like them."""
FORMULAS: dict[str, Formula] = {
    **{formula.__name__: formula for formula in OF_THEIR_NAME},
    "laid_out": none,
    "flash4_forward": flash4_forward,
    "gated_norm_forward": none,
    "qkv_convolution_forward": short_convolution,
    "selective_scan_pieces": selective_scan,
    "short_convolution_forward": short_convolution,
    "ssd_forward": ssd,
}
"""The formula of each operator `seqarch::name`; a backward pass without one counts twice its forward pass."""


def count(operator: str) -> None:
    """Let counters use the formula of the registered operator `namespace::name`. `FORMULAS` must have one."""
    namespace, _, name = operator.partition("::")
    register_flop_formula(getattr(getattr(torch.ops, namespace), name))(FORMULAS[name])


def register_all() -> None:
    """Import the operators, which registers their formulas. Needs Triton."""
    importlib.import_module("seqarch.kernels.flash4")
    for path in sorted(Path(__file__).parent.glob("*/triton*.py")):
        importlib.import_module(f"seqarch.kernels.{path.parent.name}.{path.stem}")
