"""Measures how uniform each head's attention is while the model trains (figure 4 of arXiv 2505.18522)."""

from typing import Any

import torch
from torch import Tensor

from seqarch.data.packing import borders
from seqarch.errors import check_counts
from seqarch.runs import tags
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
        self, every_n_steps: int = 100, probe_sequences: int = 4, probe_length: int | None = None, heads: bool = True
    ) -> None:
        super().__init__(every_n_steps)
        counts = {"attention_entropy.probe_sequences": probe_sequences, "attention_entropy.probe_length": probe_length}
        check_counts(**counts)
        self.probe_sequences = probe_sequences
        self.probe_length = probe_length
        self.heads = heads

    def measure(self, trainer: Any, pl_module: Any) -> None:
        first = trainer.datamodule.evaluation_sets()[0]
        length = first.tokens.shape[1] - 1
        part = slice(self.probe_sequences), slice(min(self.probe_length or length, length))
        probe, segments = (
            first.tokens[part].to(pl_module.device),
            None if first.segments is None else first.segments[part],
        )
        with trainer.precision_plugin.forward_context():
            entropy = layer_entropy(pl_module.lm, probe, segments)
        metrics: dict[str, float] = {}
        for layer, heads in entropy.items():
            implied = pl_module.lm.blocks[layer].mixer.implied
            metrics[tags.entropy(layer, implied=implied)] = float(heads.mean())
            if self.heads:
                each = {tags.entropy(layer, head, implied=implied): float(value) for head, value in enumerate(heads)}
                metrics |= each
        if metrics:
            log(trainer, metrics)


@torch.no_grad()
def layer_entropy(lm: Any, tokens: Tensor, segments: Tensor | None = None) -> dict[int, Tensor]:
    """Mean entropy of each head, `[H]` in nats for each layer whose mixer has one, over `[B, T]` tokens.

    With `segments [B, T]` queries see only their own document.

    Each mixer is asked inside its own block's forward pass: there FSDP has its weights. Compilation of the blocks is
    undone for a while. Ops inside that compile themselves (FlexAttention) go on doing so, which
    `torch.compiler.set_stance("force_eager")` would forbid: uncompiled they hold all T x T scores at once.
    """
    entropy: dict[int, list[Tensor]] = {}

    def probe(mixer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        heads = mixer.attention_entropy(args[0], cu_seqlens=kwargs.get("cu_seqlens"))
        if heads is not None:
            entropy.setdefault(mixer.layer_idx, []).append(heads.float().mean(dim=(0, 1)))

    mixers = [block.mixer for block in lm.blocks if block.mixer is not None]
    compiled = [(block, block._compiled_call_impl) for block in lm.blocks]
    hooks = [mixer.register_forward_pre_hook(probe, with_kwargs=True) for mixer in mixers]
    try:
        for block in lm.blocks:
            block._compiled_call_impl = None
        for row, sequence in enumerate(tokens.split(1)):
            cu_seqlens = None if segments is None else borders(segments[row : row + 1]).to(tokens.device)
            lm(sequence, last_only=True, cu_seqlens=cu_seqlens)
    finally:
        for block, call in compiled:
            block._compiled_call_impl = call
        for hook in hooks:
            hook.remove()
    return {layer: torch.stack(values).mean(dim=0) for layer, values in sorted(entropy.items())}
