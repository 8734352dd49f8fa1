"""Causal softmax attention."""

from seqarch.kernels.softmax_attention.op import softmax_attention

__all__ = ["softmax_attention"]
