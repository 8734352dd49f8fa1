"""Language models made of mixers."""

from seqarch.model.block import Block
from seqarch.model.feed_forward import GELUMLP, FeedForward, GeGLU, RWKVChannelMix, RWKVGatedChannelMix, SwiGLU
from seqarch.model.generate import generate
from seqarch.model.lm import LMState, SequenceLM

__all__ = [
    "GELUMLP",
    "Block",
    "FeedForward",
    "GeGLU",
    "LMState",
    "RWKVChannelMix",
    "RWKVGatedChannelMix",
    "SequenceLM",
    "SwiGLU",
    "generate",
]
