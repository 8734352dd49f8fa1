"""The recurrence of RWKV-5 and RWKV-6."""

from seqarch.kernels.rwkv6.op import rwkv6

__all__ = ["rwkv6"]
