"""Based's linear attention: the exponential of softmax attention replaced by its second-order Taylor expansion."""

from seqarch.kernels.taylor_attention.op import taylor_linear_attention
from seqarch.kernels.taylor_attention.reference import n_features, taylor_features

__all__ = ["n_features", "taylor_features", "taylor_linear_attention"]
