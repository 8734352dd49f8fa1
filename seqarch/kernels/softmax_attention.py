"""Softmax attention: SDPA where it fits, FlexAttention on CUDA for the rest, blocks of queries elsewhere.

FlashAttention-4 (package flash-attn-4, arXiv 2603.05451) runs as operators, which compiled graphs do not look into. Its
backward pass adds in a fixed order here, so that a resumed run has the bits of one without a break.
"""

import functools
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from seqarch.arguments import COUNT
from seqarch.errors import UserError
from seqarch.kernels.blocks import alibi_bias, causal_mask, over_query_blocks, positions, sdpa
from seqarch.kernels.flops import causal_keys, last_queries, none
from seqarch.kernels.launch import gradient_of, operator
from seqarch.kernels.op import Backend, Op, in_compiled_pass, load_function
from seqarch.kernels.packages import FOUND, INSTALL, is_hopper
from seqarch.kernels.packed import per_document
from seqarch.kernels.tensors import autocast_cast, check_attention, default_scale, is_tracked

FA4_TESTED = "4.0.0b36"
"""The version of flash-attn-4 whose functions we call. They are not public, and change between versions."""


def _fa4(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, slopes: None, cu_seqlens: Tensor | None
) -> Tensor:
    """As `softmax_attention_reference`, in half precision on Hopper and newer GPUs."""
    return fa4_forward(q, k, v, scale, window, cu_seqlens)[0]


def _fa4_empty(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _D = q.shape
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(B, H, T, dtype=torch.float32)


@functools.cache
def _fa4_function(name: str) -> Any:
    found = version("flash-attn-4")
    if found != FA4_TESTED:
        raise UserError(f"flash-attn-4 {found} is installed, and seqarch calls {FA4_TESTED}: {INSTALL['flash-attn-4']}")
    return load_function(f"flash_attn.cute.interface:{name}")


def _fa4_options(scale: float, window: int | None, cu_seqlens: Tensor | None) -> dict[str, Any]:
    left = None if window is None else window - 1
    return {
        **{"softmax_scale": scale, "causal": True, "window_size_left": left},
        **{"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens},
    }


def _without_batch(cu_seqlens: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, without the batch of one row if documents are packed."""
    return tensors if cu_seqlens is None else tuple(t[0] for t in tensors)


def _fa4_flops(q, k, v, scale, window, *_):
    return 4 * last_queries(causal_keys, q, k, window)


@operator("seqarch::flash4_forward", _fa4_empty, flops=_fa4_flops)
def fa4_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp `[B, H, Tq]` of the scores."""
    options = _fa4_options(scale, window, cu_seqlens)
    o, lse, *_ = _fa4_function("_flash_attn_fwd")(*_without_batch(cu_seqlens, q, k, v), return_lse=True, **options)
    return o.view(q.shape), lse.view(q.shape[0], q.shape[2], q.shape[1])


@gradient_of(fa4_forward, gradients=3, keep=(0, 1))
def fa4_backward(do, q, k, v, scale, window, cu_seqlens, o, lse):
    """dq, dk and dv."""
    options = _fa4_options(scale, window, cu_seqlens)
    tensors = _without_batch(cu_seqlens, q, k, v, o, do, lse)
    found = _fa4_function("_flash_attn_bwd")(*tensors, deterministic=True, **options)
    return tuple(gradient.view(t.shape) for gradient, t in zip(found, (q, k, v), strict=True))


FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal softmax attention, `o_i = sum_j softmax_j(scale * q_i . k_j) v_j` over `j <= i`.

    The queries are the last Tq of the Tk positions: query i has position `Tk - Tq + i`. So one call covers a whole
    sequence (Tq = Tk), a piece that continues from cached keys, and one decoded token (Tq = 1).

    Args:
        q: `[B, Tq, H, D]`.
        k: `[B, Tk, HK, D]`, `HK` a divisor of `H`: query head h uses key head `h // (H / HK)`.
        v: as `k`.
        scale: factor on the scores; None is `D ** -0.5`.
        window: only the last `window` keys, the query's own position included.
        alibi_slopes: `[H]`, adds `-slope * (i - j)` to the scaled scores (ALiBi, arXiv 2108.12409). No gradient.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row of Tk keys (B = 1); attention and distances
            restart at each.
        backend: "auto", "reference", "fa4" (FlashAttention-4, in half precision, without ALiBi), "sdpa" (without
            window, ALiBi and packed documents; whole sequences, one new token and, in half precision without gradients,
            pieces) or "flex" (FlexAttention).

    Returns:
        `[B, Tq, H, D]` in the dtype of `q`, or of autocast if it is on.

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    q, k, v = autocast_cast(q, k, v)
    check_attention(q, k, v, cu_seqlens, alibi_slopes)
    COUNT.check("window", window)  # with the query's own position
    scale = default_scale(scale, q)
    if q.shape[1] == 1 and window is not None and cu_seqlens is None:
        k, v, window = k[:, -window:], v[:, -window:], None
    return SOFTMAX_ATTENTION.run(backend, q, k, v, scale, window, alibi_slopes, cu_seqlens)


def softmax_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, slopes: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """As `softmax_attention`, by blocks of queries against the keys that the block sees."""
    if cu_seqlens is not None:
        alone = partial(softmax_attention_reference, scale=scale, window=window, slopes=slopes, cu_seqlens=None)
        return per_document(alone, (q, k, v), cu_seqlens)
    single = q.shape[1] == 1
    if window is None and slopes is None and (single or q.shape[1] == k.shape[1]):
        return sdpa(q, k, v, scale, is_causal=not single)  # `not` makes a bool of a symbol
    if window is not None:
        return _banded(q, k, v, scale, window, slopes)
    return over_query_blocks(_block, q, (k, v), scale=scale, slopes=slopes)


def _banded(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, slopes: Tensor | None) -> Tensor:
    """Blocks of about as many queries as the window has keys, so that most computed scores are needed."""
    offset = k.shape[1] - q.shape[1]
    size = max(window, 256)
    pieces = []
    for start in range(0, q.shape[1], size):
        stop = min(start + size, q.shape[1])
        first = max(offset + start - window + 1, 0)
        keys = slice(first, offset + stop)
        tensors = q[:, start:stop], k[:, keys], v[:, keys]
        pieces.append(_block(offset + start - first, *tensors, scale, slopes, window))
    return torch.cat(pieces, dim=1)


def _block(
    start: int, q: Tensor, k: Tensor, v: Tensor, scale: float, slopes: Tensor | None, window: int | None = None
) -> Tensor:
    i, j = positions(start, q, k)
    mask = causal_mask(i, j, window)
    if slopes is not None:
        bias = alibi_bias(i, j, slopes).masked_fill(~mask, float("-inf"))
        mask = bias.to(q.dtype).unsqueeze(0)
    return sdpa(q, k, v, scale, mask)


MASK_BLOCK = 128


def flex_softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, slopes: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    Tq, Tk = q.shape[1], k.shape[1]
    starts = laid_out(first_visible(Tq, Tk, window, cu_seqlens, q.device))
    score_mod = None if slopes is None else alibi_score(slopes, first_position(Tq, Tk))
    return flex_attend(q, k, v, scale, banded_block_mask(starts, Tk), score_mod)


def flex_attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, block_mask: BlockMask, score_mod: Callable[..., Tensor] | None = None
) -> Tensor:
    """FlexAttention on `[B, T, H, D]`, compiled by itself or as a part of the graph that is being compiled."""
    attend = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    shares = q.shape[2] != k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o: Any = attend(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=shares)
    return o.transpose(1, 2)


def first_position(Tq: int, Tk: int) -> int:
    """The position of the first query.

    In whole sequences it is a plain 0: in a graph for changing lengths, FlexAttention's masks cannot hold `Tk - Tq`.
    """
    return 0 if Tq == Tk else Tk - Tq


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention)


@operator("seqarch::laid_out", torch.empty_like, flops=none)
def laid_out(t: Tensor) -> Tensor:
    """A copy that compiled graphs do not look into.

    FlexAttention's masks hold only tensors with a fixed layout. In graphs for changing lengths, what the graph computes
    itself has none (Inductor of PyTorch 2.11).
    """
    return t.clone()


def first_visible(Tq: int, Tk: int, window: int | None, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """`[Tq]` int32: the first key position each query sees; it never falls from one query to the next."""
    i = torch.arange(Tk - Tq, Tk, device=device, dtype=torch.int32)
    first = torch.zeros_like(i) if window is None else (i - window + 1).clamp_min(0)
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens, i, right=True) - 1
        first = torch.maximum(first, cu_seqlens[document])
    return first


def alibi_score(slopes: Tensor, offset: int) -> Callable[..., Tensor]:
    """The score modification of ALiBi for queries that start at position `offset`."""
    slopes = slopes.detach().float()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i + offset - j)

    return score_mod


def banded_block_mask(first: Tensor, Tk: int) -> BlockMask:
    """The mask "query i sees keys `first[i]` to its own position".

    `first` never falls. So each row of blocks is one run of visible blocks, with a run of full blocks inside. The mask
    follows by arithmetic on `[Tq / 128]` numbers.
    """
    Tq = first.shape[0]
    offset = first_position(Tq, Tk)
    top, bottom, run_start, run_stop = _visible_runs(first, Tk)
    columns = -(-Tk // MASK_BLOCK)
    full_start = (first[bottom] + MASK_BLOCK - 1) // MASK_BLOCK
    full_stop = torch.maximum((top + offset + 1) // MASK_BLOCK, full_start)
    r = torch.arange(columns, device=first.device, dtype=torch.int32).unsqueeze(0)
    before = (full_start - run_start).unsqueeze(1)
    partial = torch.where(r < before, run_start.unsqueeze(1) + r, full_stop.unsqueeze(1) + r - before)
    full = full_start.unsqueeze(1) + r
    full_count = full_stop - full_start

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i + offset) & (j >= first[i])

    return _block_mask((Tq, Tk), mask_mod, (run_stop - run_start - full_count, partial), (full_count, full))


def partial_block_mask(first: Tensor, Tk: int, mask_mod: Callable[..., Tensor]) -> BlockMask:
    """The mask `mask_mod`, which hides at least all keys outside `first[i]` to a query's own position.

    As `banded_block_mask`, but no block counts as full: `mask_mod` decides about each key of the visible blocks.
    """
    _, _, run_start, run_stop = _visible_runs(first, Tk)
    r = torch.arange(-(-Tk // MASK_BLOCK), device=first.device, dtype=torch.int32)
    return _block_mask((first.shape[0], Tk), mask_mod, (run_stop - run_start, run_start.unsqueeze(1) + r))


def _block_mask(lengths: tuple[int, int], mask_mod: Callable[..., Tensor], *kinds: tuple[Tensor, Tensor]) -> BlockMask:
    """A block mask from the number and the columns of visible blocks per row: partial blocks, then full blocks."""
    blocks = []
    for count, columns in kinds:
        blocks += [count[None, None], columns.clamp_max(columns.shape[1] - 1)[None, None].contiguous()]
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=MASK_BLOCK, mask_mod=mask_mod, seq_lengths=lengths)


def _visible_runs(first: Tensor, Tk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each row of blocks: first and last query, first visible block, and the block after the last visible one."""
    Tq = first.shape[0]
    top = torch.arange(-(-Tq // MASK_BLOCK), device=first.device, dtype=torch.int32) * MASK_BLOCK
    bottom = (top + MASK_BLOCK - 1).clamp_max(Tq - 1)
    return top, bottom, first[top] // MASK_BLOCK, (bottom + Tk - Tq) // MASK_BLOCK + 1


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, *_: None) -> Tensor:
    if q.shape[1] == 1:
        return sdpa(q, k, v, scale)
    if q.shape[1] < k.shape[1]:
        return sdpa(q, k, v, scale, causal_lower_right(q.shape[1], k.shape[1]))
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return sdpa(q, k, v, scale, is_causal=True)


def _sdpa_obstacle(q: Tensor, k: Tensor, v: Tensor, scale: float, *options: Any) -> str | None:
    if any(option is not None for option in options):
        return "it takes neither window nor ALiBi nor packed documents"
    if q.shape[1] not in (1, k.shape[1]) and not _flash_takes(q, k, v):
        return "several queries after cached keys, which it takes only in half precision, without gradients"
    return None


def _flash_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention computes several queries after cached keys, with the last query next to the last key."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and q.shape[2] == k.shape[2] and q.shape[3] <= 256 and q.is_cuda and not is_tracked(q, k, v)


def _fa4_obstacle(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, slopes: Tensor | None, cu_seqlens: Tensor | None
) -> str | None:
    if slopes is not None:
        return "it does not take ALiBi"
    if cu_seqlens is not None and q.shape[1] != k.shape[1]:
        return "packed documents need as many queries as keys"
    if q.dtype == torch.float32 or q.shape[3] not in (64, 128, 192, 256):  # of 40 dims it has wrong gradients
        return "it takes half precision and heads of 64, 128, 192 or 256 dims"
    return None


def prefers_fa4(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, slopes: Tensor | None, cu_seqlens: Tensor | None
) -> bool:
    """Whether FlashAttention-4 is installed and faster, as `benchmarks/kernels/dense.py` measured on an H200.

    As many key as query heads were measured. In training, heads of 128 lose by the fixed order the more the longer the
    sequence is: 102,400 tokens took 329 ms, and cuDNN 270 ms. Compiled passes over prompts take it, in which the
    6 s of its first call are not the only ones.
    """
    (Tq, H, D), Tk = q.shape[1:], k.shape[1]
    if not FOUND["flash-attn-4"] or k.shape[2] != H or not is_hopper(q.device):
        return False
    if is_tracked(q, k, v):
        short = Tq <= 32768 or window is not None or cu_seqlens is not None
        return Tq >= 2048 and (D == 64 or (D == 128 and short))
    return in_compiled_pass() and 512 <= Tq < Tk and window is None and D in (64, 128)


SOFTMAX_ATTENTION = Op(
    "softmax_attention",
    softmax_attention_reference,
    (
        Backend("fa4", _fa4, "flash-attn-4", obstacle=_fa4_obstacle, automatic=prefers_fa4),
        Backend("sdpa", _sdpa, obstacle=_sdpa_obstacle, float64=True),
        Backend("flex", flex_softmax_attention, peer=True),
    ),
)
