"""The state space dual of Mamba-2."""

from seqarch.kernels.ssd.op import ssd

__all__ = ["ssd"]
