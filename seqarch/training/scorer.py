"""The model in training, as evaluation tasks see it."""

from typing import Any

import lightning as L

from seqarch.evaluation import Scorer


def scorer_of(trainer: L.Trainer, module: Any) -> Scorer:
    """The model of a `LanguageModel` as tasks see it, shared by the processes of the trainer."""
    data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    return Scorer(
        module.lm,
        data.tokenizer,
        context=trainer.precision_plugin.forward_context,
        batch_size=data.batch_size(trainer.world_size),
        max_tokens=data.batch_size(trainer.world_size) * data.sequence_length,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
    )
