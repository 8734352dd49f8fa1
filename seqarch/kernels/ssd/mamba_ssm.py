"""The recurrence of Mamba-2 through the authors' Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError, one_line
from seqarch.kernels.recurrent import INSTALL

CHUNK = 256
"""Tokens a chunk, as in the published module."""


@torch.compiler.disable()
def ssd_mamba_ssm(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`ssd` on CUDA; the package keeps states as `[P, N]`."""
    y, state = _kernel()(
        x,
        dt,
        dt.new_zeros(x.shape[2]) if A is None else A.to(dt.dtype),
        B,
        C,
        CHUNK,
        initial_states=None if initial_state is None else initial_state.transpose(2, 3).contiguous(),
        return_final_states=True,
    )
    return y, state.transpose(2, 3)


def _kernel() -> Callable[..., Any]:
    try:
        from mamba_ssm.ops.triton.ssd_combined import (  # pyright: ignore[reportMissingImports]  optional
            mamba_chunk_scan_combined,
        )
    except ImportError as error:
        # the package imports selective_scan_cuda, an extension that is compiled for one version of torch
        raise UserError(
            f"backend 'mamba_ssm' is installed but cannot be imported ({one_line(error)}): its CUDA extension must be "
            f"built for this version of torch ({INSTALL['mamba_ssm']}); or use backend 'fla'"
        ) from error
    return mamba_chunk_scan_combined
