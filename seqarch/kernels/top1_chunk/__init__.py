"""Top-1 chunk selection, attention and decoding."""

from seqarch.kernels.top1_chunk.decode import top1_chunk_decode
from seqarch.kernels.top1_chunk.op import select_chunks, top1_chunk_attention

__all__ = ["select_chunks", "top1_chunk_attention", "top1_chunk_decode"]
