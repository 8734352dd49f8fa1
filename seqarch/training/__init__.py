"""Pre-training: the LightningModule, its callbacks and the run folder."""

from seqarch.training.fsdp import FSDP2
from seqarch.training.module import LanguageModel

__all__ = ["FSDP2", "LanguageModel"]
