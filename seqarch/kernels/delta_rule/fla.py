"""The delta rule by flash-linear-attention's kernels (fla-core 0.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels.recurrent import INSTALL, is_installed


@torch.compiler.disable
def delta_rule_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Chunked kernels; the recurrent ones for one token without gradients.

    The chunked kernel without decay takes half precision alone, so float32 without decay runs the recurrent one too,
    which is exact and differentiable but slow for long sequences.
    """
    if q.dtype == torch.float64:
        raise UserError("backend 'fla' takes at most float32, not float64: use backend 'reference'")
    tensors = (q, k, v, beta, log_decay, initial_state)
    differentiates = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    options = {
        "q": q,
        "k": k,
        "v": v,
        "beta": beta,
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": True,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.long(),
    }
    recurrent = q.shape[1] == 1 and not differentiates
    if not recurrent and not (log_decay is None and q.dtype == torch.float32) and k.shape[-1] > 256:
        raise UserError(f"backend 'fla' takes keys of at most 256 dims, not {k.shape[-1]}: use backend 'reference'")
    if log_decay is None:
        from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule

        recurrent = recurrent or q.dtype == torch.float32
        return (fused_recurrent_delta_rule if recurrent else chunk_delta_rule)(**options)
    if differentiates:
        check_triton(q.device)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    return (fused_recurrent_gated_delta_rule if recurrent else chunk_gated_delta_rule)(g=log_decay, **options)


def check_triton(device: torch.device) -> None:
    """Refuse the Triton versions with which fla's gated kernels have wrong gradients on Hopper, before they run.

    fla raises for them too, but from within the backward pass.
    """
    import triton

    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    if hopper and (3, 4) <= version < (3, 7, 1) and not is_installed("tilelang"):
        raise UserError(
            f"Triton {triton.__version__} computes wrong gradients for gated recurrences on Hopper GPUs: "
            f"{INSTALL['fla']}"
        )
