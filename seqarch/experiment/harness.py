"""A checkpoint as a model of lm-evaluation-harness, found as `--model seqarch` if its version reads entry points."""

from typing import Any

from seqarch.evaluation.harness import SeqarchLM
from seqarch.experiment.evaluate import open_checkpoint


class CheckpointLM(SeqarchLM):
    """A checkpoint for `lm_eval.simple_evaluate(model=CheckpointLM(checkpoint="step_00000400.ckpt"), tasks=[...])`.

    Args:
        checkpoint: the file; of a run folder the newest.
        precision: a precision of Lightning's trainer; by default the one of the training.
        options: what lm-eval adds, such as its batch size; not used.
    """

    def __init__(self, checkpoint: str, precision: str | None = None, **options: Any) -> None:
        super().__init__(open_checkpoint(checkpoint, precision).scorer)
