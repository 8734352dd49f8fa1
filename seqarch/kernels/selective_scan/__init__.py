"""The selective scan of Mamba-1."""

from seqarch.kernels.selective_scan.op import selective_scan

__all__ = ["selective_scan"]
