"""Ops on plain tensors `[B, T, ...]`, each with a plain PyTorch reference and, on CUDA, a faster backend."""

from seqarch.kernels.attention_entropy import attention_entropy
from seqarch.kernels.delta_rule import delta_rule
from seqarch.kernels.gated_norm import gated_rms_norm
from seqarch.kernels.linear_cross_entropy import linear_cross_entropy
from seqarch.kernels.rwkv6 import rwkv6
from seqarch.kernels.rwkv7 import rwkv7
from seqarch.kernels.selective_scan import selective_scan
from seqarch.kernels.short_convolution import qkv_convolution, short_convolution
from seqarch.kernels.softmax_attention import softmax_attention
from seqarch.kernels.ssd import ssd
from seqarch.kernels.taylor_attention import taylor_linear_attention
from seqarch.kernels.top1_chunk import select_chunks, top1_chunk_attention, top1_chunk_decode
from seqarch.kernels.top1_element import top1_element_attention

__all__ = [
    "attention_entropy",
    "delta_rule",
    "gated_rms_norm",
    "linear_cross_entropy",
    "qkv_convolution",
    "rwkv6",
    "rwkv7",
    "select_chunks",
    "selective_scan",
    "short_convolution",
    "softmax_attention",
    "ssd",
    "taylor_linear_attention",
    "top1_chunk_attention",
    "top1_chunk_decode",
    "top1_element_attention",
]
