"""The functions of the package flash-attn that MoBA's published code calls, on PyTorch's FlashAttention-2 kernels.

    PYTHONPATH=benchmarks/torch_flash_attn python -m benchmarks.kernels limits time moba --csv moba.csv

flash-attn itself must be built for each version of PyTorch.
"""

from flash_attn.flash_attn_interface import flash_attn_varlen_func

__all__ = ["flash_attn_varlen_func"]
