"""Normalisation layers by the name that recipes use."""

from typing import Literal

from torch import nn

NormName = Literal["rmsnorm", "layernorm"]


def build_norm(name: NormName, d_model: int) -> nn.Module:
    """RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) over the last dimension."""
    return {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm}[name](d_model, eps=1e-5)
