"""How uniform the attention of a model is, on the same tokens for all models with one tokenizer."""

from typing import Any

import torch
from torch import Tensor

from seqarch.arguments import Count
from seqarch.data.datamodule import TextDataModule
from seqarch.data.packing import borders
from seqarch.errors import UserError
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Scores, Task


class Entropy(Task):
    """The entropy of the attention weights in nats, averaged over queries, heads and layers, `entropy/attention`.

    For recurrent layers it is that of their implied weights, `entropy/implied`, another quantity
    (`seqarch.mixers.implied`). A model with both kinds of layers has both metrics. The tokens are those of the
    callback `AttentionEntropy`.

    Args:
        sequences: sequences of the probe batch.
        length: the first tokens of a sequence that are used; all if there are fewer.

    Raises:
        UserError: a number below 1.
    """

    group = "entropy"

    def __init__(self, sequences: Count = 4, length: Count = 1024) -> None:
        self.sequences, self.length = sequences, length

    def check(self, scorer: Scorer) -> None:
        mixers: Any = (block.mixer for block in scorer.lm.blocks if block.mixer is not None)
        if not any("entropy" in mixer.capabilities for mixer in mixers):
            raise UserError("Entropy: no mixer of this model has attention weights: leave it out")

    def prepare(self, data: TextDataModule) -> None:
        self.tokens, self.segments = probe(data, self.sequences, self.length)

    def score(self, scorer: Scorer) -> Scores:
        with scorer.evaluating():
            layers = layer_entropy(scorer.lm, self.tokens.to(scorer.device), self.segments)
        found: dict[str, list[float]] = {}
        for layer, heads in layers.items():
            mixer: Any = scorer.lm.blocks[layer].mixer
            tag = "entropy/implied" if mixer.implied else "entropy/attention"
            found.setdefault(tag, []).append(float(heads.mean()))
        return Scores({tag: sum(each) / len(each) for tag, each in found.items()})


def probe(data: TextDataModule, sequences: int, length: int | None = None) -> tuple[Tensor, Tensor | None]:
    """The first tokens of the first training domain's hold-out, the same every time, for `layer_entropy`.

    Args:
        data: of the run.
        sequences: how many.
        length: tokens of each; by default all but the last one, which is only predicted.

    Returns:
        The tokens `[sequences, length]`, and with a document mask their segments.
    """
    first = data.evaluation_sets()[0]
    most = first.tokens.shape[1] - 1
    part = slice(sequences), slice(min(length or most, most))
    return first.tokens[part], None if first.segments is None else first.segments[part]


@torch.no_grad()
def layer_entropy(lm: Any, tokens: Tensor, segments: Tensor | None = None) -> dict[int, Tensor]:
    """Mean entropy of each head, `[H]` in nats for each layer whose mixer has one, over `[B, T]` tokens.

    With `segments [B, T]` queries see only their own document.

    Each mixer is asked inside its own block's forward pass: there FSDP has its weights. Compilation of the blocks is
    undone for a while. Ops inside that compile themselves (FlexAttention) go on doing so, which
    `torch.compiler.set_stance("force_eager")` would forbid: uncompiled they hold all T x T scores at once.
    """
    entropy: dict[int, list[Tensor]] = {}

    def ask(mixer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        heads = mixer.attention_entropy(args[0], cu_seqlens=kwargs.get("cu_seqlens"))
        if heads is not None:
            entropy.setdefault(mixer.layer_idx, []).append(heads.float().mean(dim=(0, 1)))

    mixers = [block.mixer for block in lm.blocks if block.mixer is not None]
    compiled = [(block, block._compiled_call_impl) for block in lm.blocks]
    hooks = [mixer.register_forward_pre_hook(ask, with_kwargs=True) for mixer in mixers]
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
