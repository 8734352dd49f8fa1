"""Entropy of attention distributions."""

from seqarch.kernels.attention_entropy.op import attention_entropy

__all__ = ["attention_entropy"]
