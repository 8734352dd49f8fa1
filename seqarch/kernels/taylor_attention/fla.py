"""Taylor linear attention by flash-linear-attention's kernel for linear attention (fla-core 0.6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels.fla_tuning import fla_op
from seqarch.kernels.taylor_attention.reference import normalised, taylor_features

ALIGNMENT = 16
"""Values are widened by so many columns, of which one holds the ones, and features to a multiple of it: rows stay
aligned for wide loads, and the kernels take no odd sizes."""


def taylor_fla(
    q: Tensor, k: Tensor, v: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Explicit features through `chunk_simple_gla`.

    fla's own kernels for Based (`parallel_based`, `fused_chunk_based`) have neither a state nor packed documents, and
    the first is quadratic in T.
    """
    V = v.shape[-1]
    values = F.pad(F.pad(v, (0, 1), value=1.0), (0, ALIGNMENT - 1))
    # Features of float32: a feature is a product of two elements and would be rounded twice otherwise.
    queries, keys = (taylor_features(t.float(), scale) for t in (q, k))
    size = queries.shape[-1]
    missing = -size % ALIGNMENT
    queries, keys = (F.pad(t, (0, missing)).to(q.dtype) for t in (queries, keys))
    if initial_state is not None:
        initial_state = F.pad(initial_state, (0, ALIGNMENT - 1, 0, missing))
    o, state = _linear_attention(queries, keys, values, initial_state, cu_seqlens)
    return normalised(o.float(), V).to(q.dtype), state[..., :size, : V + 1].contiguous()


@torch.compiler.disable()
def _linear_attention(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    kernel = fla_op("fla.ops.simple_gla", "chunk_simple_gla")
    return kernel(
        q=q,
        k=k,
        v=v,
        scale=1.0,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )
