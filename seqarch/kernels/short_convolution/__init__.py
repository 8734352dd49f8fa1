"""Short causal convolution: each channel mixes its last few tokens."""

from seqarch.kernels.short_convolution.op import qkv_convolution, short_convolution

__all__ = ["qkv_convolution", "short_convolution"]
