"""What training refuses before its first step: options that it cannot follow, and mixers without a capability."""

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning_utilities.core.rank_zero import rank_zero_warn

from seqarch.arguments import Interval, divide
from seqarch.errors import SeqarchWarning, UserError
from seqarch.mixers import Mixer
from seqarch.mixers.pieces import Piece, waits
from seqarch.model import SequenceLM

UNUSED = {
    **{"fast_dev_run": False, "max_epochs": -1, "overfit_batches": 0.0, "limit_train_batches": 1.0},
    **{"reload_dataloaders_every_n_epochs": 0, "min_steps": None},
}
"""Options of the trainer that training cannot follow, each with the value that changes nothing.

1 is one batch, 1.0 is all. `None` stands in where an option is left out.
"""


def check_capability(lm: SequenceLM, capability: str, option: str) -> None:
    """Refuse mixers that lack a capability which an option needs."""
    if names := _names(lm, lambda layer: isinstance(layer, Mixer) and capability not in layer.capabilities):
        raise UserError(f"{option} needs '{capability}', a capability that {names} lacks: leave it out, or the mixer")


def check_pieces(lm: SequenceLM, piece: Piece, document_mask: bool, sequence_length: int) -> None:
    """Refuse what several processes that share each sequence cannot train; warn of layers that make them wait.

    Args:
        lm: the model.
        piece: the piece of this process.
        document_mask: `data.document_mask`.
        sequence_length: `data.sequence_length`.
    """
    divide(**{"data.sequence_length": sequence_length, "trainer.strategy.context": piece.size})
    check_capability(lm, "decode", "context of fsdp2")
    if names := _names(lm, waits):
        lacks = f"{names} has no rule that joins pieces (MixerState.split)"
        if document_mask:
            raise UserError(f"{lacks}, which data.document_mask with context needs: leave one of them out")
        slower = "the processes that share a sequence (context of fsdp2) run it one after the other"
        rank_zero_warn(f"{lacks}, so {slower}", category=SeqarchWarning)


def _names(lm: SequenceLM, which: Callable[[Any], bool]) -> str:
    """The classes of some mixers and feed-forward layers, each once."""
    layers: Any = (layer for block in lm.blocks for layer in (block.mixer, block.feed_forward) if layer is not None)
    return ", ".join(dict.fromkeys(type(layer).__name__ for layer in layers if which(layer)))


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse options of the trainer that prevent training or that training would not follow."""
    Interval(0).check("trainer.gradient_clip_val", trainer.gradient_clip_val)
    if trainer.gradient_clip_algorithm not in (None, "norm"):
        raise UserError("trainer.gradient_clip_algorithm must be norm, as it is by default")
    for option, default in UNUSED.items():
        value = getattr(trainer, option)
        if value is not None and (type(value), value) != (type(default), default):
            raise UserError(f"trainer.{option} is {value}, but samples follow from max_steps and data: leave it out")
