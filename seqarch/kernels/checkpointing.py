"""Results that activation checkpointing keeps, because they are small but expensive to compute again."""

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

KEPT = {"seqarch::top1_select"}
"""Operators whose results are kept: a selection costs T^2 operations and is 4 bytes per query and head."""


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def keep_selections() -> tuple[Any, Any]:
    """For the argument `context_fn` of `torch.utils.checkpoint.checkpoint`."""
    return create_selective_checkpoint_contexts(_policy)
