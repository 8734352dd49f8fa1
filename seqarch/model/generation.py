"""Tokens from a trained model, through its decoding state."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqarch.arguments import Count, typed
from seqarch.errors import UserError
from seqarch.model.decoder import Decoder
from seqarch.model.lm import SequenceLM

Stop = Collection[int] | Callable[[int, list[int]], bool]
"""Tokens that end a sequence, or a function of a prompt's index and its new tokens that says whether it has ended."""


def generate(lm: SequenceLM, prompts: Tensor | Sequence[Tensor], max_new_tokens: int, **options: Any) -> list[Tensor]:
    """Return the new tokens of each prompt, in the order of the prompts, each a 1-D tensor on the CPU.

    Arguments and errors are those of `stream`, such as `stop`, `batch_size` and `temperature`.
    """
    drawn: dict[int, list[int]] = {}
    for row, token in stream(lm, prompts, max_new_tokens, **options):
        drawn.setdefault(row, []).append(token)
    return [torch.tensor(drawn.get(row, []), dtype=torch.int64) for row in range(len(prompts))]


@typed
def stream(
    lm: SequenceLM,
    prompts: Tensor | Sequence[Tensor],
    max_new_tokens: Count,
    *,
    stop: Stop = (),
    batch_size: Count | None = None,
    **options: Any,
) -> Iterator[tuple[int, int]]:
    """Yield the index of a prompt and its next token, as tokens are drawn.

    Args:
        lm: a model whose mixers can all decode, on its device; see `Decoder` for its precision.
        prompts: token ids, `[B, T]` or a list of 1-D tensors of any lengths of at least 1.
        max_new_tokens: most tokens to draw for each prompt.
        stop: token ids that end a sequence, or a function that takes the index of a prompt and its new tokens, and says
            whether they end there; the last token is kept.
        batch_size: prompts that are read together, those of similar length; by default all.
        **options: as in `Decoder`.

    Raises:
        UserError: an empty prompt or one that is not token ids, options out of range, a mixer that cannot decode, or a
            batch too large for memory.
    """
    decoder = Decoder(lm, **options)
    rows = list(prompts)
    plain = [row for row in rows if row.ndim == 1 and row.numel() and not row.is_floating_point()]
    if not rows or len(plain) < len(rows) or any(row.min() < 0 or row.max() >= lm.vocab_size for row in plain):
        raise UserError(f"each prompt must be a 1-D tensor of token ids in 0..{lm.vocab_size - 1}, at least one")
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    size = batch_size or len(rows)
    decoder.check_memory(min(size, len(rows)), max(map(len, rows)) + max_new_tokens)
    return _batches(decoder, rows, [order[i : i + size] for i in range(0, len(order), size)], max_new_tokens, stop)


def _batches(
    decoder: Decoder, rows: list[Tensor], batches: list[list[int]], max_new_tokens: int, stop: Stop
) -> Iterator[tuple[int, int]]:
    ends = stop if callable(stop) else lambda row, new: new[-1] in stop
    for batch in batches:
        lengths = [len(rows[row]) for row in batch]
        going: dict[int, list[int]] = {place: [] for place in range(len(batch))}
        for position, drawn in decoder.run([rows[row] for row in batch], max_new_tokens):
            for place, token in enumerate(drawn.tolist()):
                if place in going and position >= lengths[place]:
                    going[place].append(token)
                    yield batch[place], token
                    if len(going[place]) == max_new_tokens or ends(batch[place], going[place]):
                        del going[place]
            if not going:
                break


def with_bf16_weights(lm: SequenceLM) -> SequenceLM:
    """Cast the weights of linear layers, in place, as autocast would at every pass: results stay the same.

    The embedding stays as it is, and no longer shares its weights with the head.
    """
    for layer in lm.modules():
        if isinstance(layer, nn.Linear):
            for name, parameter in list(layer.named_parameters(recurse=False)):
                setattr(layer, name, nn.Parameter(parameter.detach().bfloat16(), requires_grad=False))
    return lm
