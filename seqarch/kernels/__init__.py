"""Ops on plain tensors `[B, T, ...]`, each with a plain PyTorch reference and, on CUDA, faster backends.

`OPS` has them as objects, with all that tests, benchmarks and tables need to know.
"""

from seqarch.kernels.attention_decode.op import ATTENTION_DECODE, attention_decode
from seqarch.kernels.attention_entropy.op import ATTENTION_ENTROPY, attention_entropy
from seqarch.kernels.delta_rule.op import DELTA_RULE, delta_rule
from seqarch.kernels.gated_norm.op import GATED_RMS_NORM, gated_rms_norm
from seqarch.kernels.linear_cross_entropy.op import LINEAR_CROSS_ENTROPY, linear_cross_entropy
from seqarch.kernels.op import Backend, Op, kernels_of
from seqarch.kernels.rwkv6.op import RWKV6, rwkv6
from seqarch.kernels.rwkv7.op import RWKV7, rwkv7
from seqarch.kernels.selective_scan.op import SELECTIVE_SCAN, selective_scan
from seqarch.kernels.short_convolution.op import (
    QKV_CONVOLUTION,
    SHORT_CONVOLUTION,
    qkv_convolution,
    short_convolution,
)
from seqarch.kernels.softmax_attention.op import SOFTMAX_ATTENTION, softmax_attention
from seqarch.kernels.ssd.op import SSD, ssd
from seqarch.kernels.taylor_attention.op import TAYLOR_LINEAR_ATTENTION, taylor_linear_attention
from seqarch.kernels.top1_chunk.decode import TOP1_CHUNK_DECODE, top1_chunk_decode
from seqarch.kernels.top1_chunk.op import SELECT_CHUNKS, TOP1_CHUNK_ATTENTION, select_chunks, top1_chunk_attention
from seqarch.kernels.top1_element.op import TOP1_ELEMENT_ATTENTION, top1_element_attention

OPS = {
    op.name: op
    for op in (
        ATTENTION_DECODE,
        ATTENTION_ENTROPY,
        DELTA_RULE,
        GATED_RMS_NORM,
        LINEAR_CROSS_ENTROPY,
        QKV_CONVOLUTION,
        RWKV6,
        RWKV7,
        SELECTIVE_SCAN,
        SELECT_CHUNKS,
        SHORT_CONVOLUTION,
        SOFTMAX_ATTENTION,
        SSD,
        TAYLOR_LINEAR_ATTENTION,
        TOP1_CHUNK_ATTENTION,
        TOP1_CHUNK_DECODE,
        TOP1_ELEMENT_ATTENTION,
    )
}
"""Every op by the name of its function."""

__all__ = [
    "OPS",
    "Backend",
    "Op",
    "attention_decode",
    "attention_entropy",
    "delta_rule",
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
