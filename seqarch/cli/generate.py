"""`seqarch generate`: text from a checkpoint."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Collection, Iterator

import torch

from seqarch.cli.messages import explain
from seqarch.data.tokenizers import load_tokenizer
from seqarch.errors import UserError, check_counts
from seqarch.mixers.registry import import_mixers
from seqarch.model import SequenceLM, generate
from seqarch.training.checkpoint import build_module, read_checkpoint


def generate_text(
    checkpoint: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    allow_code: Collection[str] = (),
) -> Iterator[str]:
    """The prompt and what the model adds to it, in pieces of text as they come."""
    if not prompt:
        raise UserError("--prompt is empty: give some text to continue")
    check_counts(**{"--max_new_tokens": max_new_tokens})
    lm, tokenizer_name = load_model(checkpoint, allow_code)
    tokenizer = load_tokenizer(tokenizer_name)
    device = next(lm.parameters()).device
    ids = tokenizer.encode(prompt)
    generator = torch.Generator(device).manual_seed(seed)
    tokens = generate(
        lm,
        torch.tensor([ids], device=device),
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        generator=generator,
    )
    shown = tokenizer.decode(ids)
    yield shown
    for token in tokens:
        if int(token) == tokenizer.eos_id:
            break
        ids.append(int(token))
        text = tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character: wait for its other bytes
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(ids)[len(shown) :]


def load_model(path: str, allow_code: Collection[str] = ()) -> tuple[SequenceLM, str]:
    """The model of a checkpoint, on a GPU if there is one, ready for evaluation; and the name of its tokenizer."""
    content = read_checkpoint(path)
    import_mixers()
    try:
        module = build_module(content, allow_code)
    except (UserError, ArgumentError, RuntimeError) as error:
        raise UserError(f"the model of {path} cannot be built here: {explain(str(error), {})}") from error
    assert module.lm is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return module.lm.to(device).eval(), content["seqarch"]["tokenizer"]
