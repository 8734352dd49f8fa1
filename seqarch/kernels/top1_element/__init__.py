"""Top-1 element attention."""

from seqarch.kernels.top1_element.op import top1_element_attention

__all__ = ["top1_element_attention"]
