"""What training refuses before its first step: options that it cannot follow, and mixers without a capability."""

import math
from typing import Any

import lightning as L
from lightning_utilities.core.rank_zero import rank_zero_warn

from seqarch.errors import SeqarchWarning, UserError
from seqarch.mixers import Mixer
from seqarch.mixers.pieces import Piece, waits
from seqarch.model import SequenceLM

UNUSED = {"overfit_batches": 0.0, "limit_train_batches": 1.0, "reload_dataloaders_every_n_epochs": 0, "min_steps": None}
"""Options of the trainer that training cannot follow, each with the value that changes nothing."""


def check_packed_mixers(lm: SequenceLM) -> None:
    """Refuse mixers that would see other documents with `data.document_mask`."""
    mixers: Any = (block.mixer for block in lm.blocks if block.mixer is not None)
    names = dict.fromkeys(type(mixer).__name__ for mixer in mixers if "packed" not in mixer.capabilities)
    if names:
        raise UserError(
            f"data.document_mask is true, but {', '.join(names)} cannot read packed documents (the capability "
            "'packed'): set data.document_mask to false, or take another mixer"
        )


def check_pieces(lm: SequenceLM, piece: Piece, document_mask: bool, sequence_length: int) -> None:
    """Refuse what several processes that share each sequence cannot train; warn of layers that make them wait.

    Args:
        lm: the model.
        piece: the piece of this process.
        document_mask: `data.document_mask`.
        sequence_length: `data.sequence_length`.
    """
    if document_mask:
        raise UserError("data.document_mask does not go with context of fsdp2 yet: set one of them to its default")
    if sequence_length % piece.size:
        raise UserError(
            f"data.sequence_length is {sequence_length}, which {piece.size} processes (context of fsdp2) cannot share "
            f"equally: make it a multiple of {piece.size}"
        )
    layers: Any = [layer for block in lm.blocks for layer in (block.mixer, block.feed_forward) if layer is not None]
    without = [each for each in layers if isinstance(each, Mixer) and "decode" not in each.capabilities]
    if names := dict.fromkeys(type(each).__name__ for each in without):
        raise UserError(
            f"{', '.join(names)} cannot read a sequence in pieces (the capability 'decode'), as context of fsdp2 "
            "does: leave context out, or take another mixer"
        )
    in_turn = [each for each in layers if waits(each)]
    if names := dict.fromkeys(type(each).__name__ for each in in_turn):
        rank_zero_warn(
            f"the processes that share a sequence (context of fsdp2) run {', '.join(names)} one after the other, "
            "since the state has no rule that joins pieces (MixerState.split)",
            category=SeqarchWarning,
        )


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse options of the trainer that prevent training or that training would not follow."""
    if (clip := trainer.gradient_clip_val) is not None and not 0 <= clip < math.inf:
        raise UserError(f"trainer.gradient_clip_val must be 0 (off) or more, not {clip}: below 0 the loss would rise")
    if trainer.max_epochs not in (None, -1):
        raise UserError(
            f"trainer.max_epochs is {trainer.max_epochs}, but max_steps ends a run: leave it and fast_dev_run out"
        )
    for option, default in UNUSED.items():
        given = getattr(trainer, option)
        if (type(given), given) != (type(default), default):  # 1 is one batch, 1.0 is all
            raise UserError(f"trainer.{option} is {given}, but samples follow from max_steps and data: leave it out")
