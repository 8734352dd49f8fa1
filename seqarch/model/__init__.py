"""Language models made of mixers."""

from seqarch.model.decoder import Decoder, StaticStep
from seqarch.model.feed_forward import GELUMLP, FeedForward, GeGLU, RWKVChannelMix, RWKVGatedChannelMix, SwiGLU
from seqarch.model.generation import generate, stream, with_bf16_weights
from seqarch.model.lm import SequenceLM

__all__ = [
    "GELUMLP",
    "Decoder",
    "FeedForward",
    "GeGLU",
    "RWKVChannelMix",
    "RWKVGatedChannelMix",
    "SequenceLM",
    "StaticStep",
    "SwiGLU",
    "generate",
    "stream",
    "with_bf16_weights",
]
