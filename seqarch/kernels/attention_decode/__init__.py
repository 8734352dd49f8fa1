"""One new token against cached keys, whose number only the device knows."""

from seqarch.kernels.attention_decode.op import attention_decode

__all__ = ["attention_decode"]
