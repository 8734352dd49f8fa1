"""Text from a trained model, token by token through its decoding state."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from seqarch.errors import UserError, check_counts
from seqarch.model.lm import SequenceLM


def generate(
    lm: SequenceLM,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yields the next token of every sequence, `[B]`, `max_new_tokens` times.

    Args:
        lm: a model whose mixers can all decode.
        prompt: `[B, T]` token ids, T >= 1; read in one pass.
        max_new_tokens: how many tokens to draw.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among the k most likely tokens alone.
        generator: source of random numbers on the model's device.

    Raises:
        UserError: for an empty prompt, a negative temperature, a `top_k` below 1 or a mixer that cannot decode.
    """
    if prompt.shape[1] == 0:
        raise UserError("the prompt is empty: give at least one token")
    if temperature < 0:
        raise UserError(f"temperature must be 0 or more, not {temperature}")
    check_counts(top_k=top_k)
    return _tokens(lm, prompt, max_new_tokens, temperature, top_k, generator)


@torch.inference_mode()
def _tokens(
    lm: SequenceLM,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    dtype = lm.embedding.weight.dtype
    state = lm.init_state(len(tokens), tokens.shape[1] + max_new_tokens, tokens.device, dtype)
    for _ in range(max_new_tokens):
        logits = lm(tokens, state=state, last_only=True)[:, -1].float()
        token = _sample(logits, temperature, top_k, generator)
        yield token
        tokens = token.unsqueeze(1)


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator).squeeze(1)
