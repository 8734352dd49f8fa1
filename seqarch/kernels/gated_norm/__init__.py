"""Mamba-2's gated RMSNorm."""

from seqarch.kernels.gated_norm.op import gated_rms_norm

__all__ = ["gated_rms_norm"]
