"""Measures how uniform each head's attention is while the model trains (figure 4 of arXiv 2505.18522)."""

from typing import Any

from seqarch.arguments import Count
from seqarch.evaluation.entropy import layer_entropy, probe
from seqarch.runs import tags
from seqarch.training.callbacks.averages import averaged
from seqarch.training.callbacks.base import EveryNSteps, log


class AttentionEntropy(EveryNSteps):
    """Logs `entropy/layer_03` and `entropy/layer_03/head_00`, in nats, averaged over the queries of a probe batch.

    For recurrent mixers it logs `implied_entropy/...` instead. That is the entropy of their implied weights, another
    quantity (`seqarch.mixers.implied`). Layers whose mixer has neither are left out.

    The probe batch is the first sequences of the first training domain's hold-out, the same every time. Entropy is
    computed for one sequence and one layer at a time, by an op whose memory is linear in the length.

    Args:
        every_n_steps: distance between two measurements in optimizer steps; 0 for none.
        probe_sequences: sequences in the probe batch.
        probe_length: the first tokens of a probe sequence that are used; `None` for all. Limit them for long sequences:
            implied weights take `T / 64` runs of the recurrence per layer, which is quadratic in T.
        heads: whether to log each head too, and not only the mean of each layer.

    Raises:
        UserError: a number below 1.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        probe_sequences: Count = 4,
        probe_length: Count | None = None,
        heads: bool = True,
    ) -> None:
        super().__init__(every_n_steps)
        self.probe_sequences = probe_sequences
        self.probe_length = probe_length
        self.heads = heads

    def measure(self, trainer: Any, pl_module: Any) -> None:
        tokens, segments = probe(trainer.datamodule, self.probe_sequences, self.probe_length)
        with averaged(trainer, pl_module), trainer.precision_plugin.forward_context():
            entropy = layer_entropy(pl_module.lm, tokens.to(pl_module.device), segments)
        metrics: dict[str, float] = {}
        for layer, heads in entropy.items():
            implied = pl_module.lm.blocks[layer].mixer.implied
            metrics[tags.entropy(layer, implied=implied)] = float(heads.mean())
            for head, value in enumerate(heads if self.heads else ()):
                metrics[tags.entropy(layer, head, implied=implied)] = float(value)
        if metrics:
            log(trainer, metrics)
