"""Ops on plain tensors `[B, T, ...]`, each with a plain PyTorch reference and, on CUDA, faster backends.

`OPS` holds them as objects, with everything that tests, benchmarks and tables need.
"""

from seqarch.kernels.attention_decode.op import attention_decode
from seqarch.kernels.attention_entropy.op import attention_entropy
from seqarch.kernels.delta_rule import delta_rule, gated_delta_rule2
from seqarch.kernels.gated_norm.op import gated_rms_norm
from seqarch.kernels.linear_cross_entropy import linear_cross_entropy
from seqarch.kernels.op import DECLARED, Backend, Op, kernels_of
from seqarch.kernels.rwkv import rwkv6, rwkv7
from seqarch.kernels.selective_scan.op import selective_scan
from seqarch.kernels.short_convolution.op import qkv_convolution, short_convolution
from seqarch.kernels.softmax_attention import softmax_attention
from seqarch.kernels.ssd.op import ssd
from seqarch.kernels.taylor_attention import taylor_linear_attention
from seqarch.kernels.top1_chunk.decode import top1_chunk_decode
from seqarch.kernels.top1_chunk.op import select_chunks, top1_chunk_attention
from seqarch.kernels.top1_element.op import top1_element_attention

OPS = {op.name: op for op in sorted(DECLARED, key=lambda op: op.name)}
"""Every op by the name of its function."""

__all__ = [
    "OPS",
    "Backend",
    "Op",
    "attention_decode",
    "attention_entropy",
    "delta_rule",
    "gated_delta_rule2",
    "gated_rms_norm",
    "kernels_of",
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
