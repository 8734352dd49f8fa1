"""Sequence mixers and their contract."""

from seqarch.mixers.base import Mixer, MixerState

__all__ = ["Mixer", "MixerState"]
