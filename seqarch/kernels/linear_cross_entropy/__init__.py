"""Cross-entropy of a linear layer without its logits."""

from seqarch.kernels.linear_cross_entropy.op import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
