"""Top-1 chunk selection and attention."""

from seqarch.kernels.top1_chunk.op import select_chunks, top1_chunk_attention

__all__ = ["select_chunks", "top1_chunk_attention"]
