"""The recurrence of RWKV-7."""

from seqarch.kernels.rwkv7.op import rwkv7

__all__ = ["rwkv7"]
