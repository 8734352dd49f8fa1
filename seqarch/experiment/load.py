"""A trained model from a checkpoint, and the text that it writes."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import yaml

from seqarch.data.tokenizers import Tokenizer, load_tokenizer
from seqarch.errors import UserError, check_counts
from seqarch.experiment.checker import check_given, first_sentence
from seqarch.experiment.given import of_text
from seqarch.mixers.registry import import_mixers
from seqarch.model import SequenceLM, generate
from seqarch.training.checkpoint import build_module, model_options, model_parser, read_checkpoint


def load(checkpoint: str | Path, allow_code: Collection[str] = ()) -> tuple[SequenceLM, Tokenizer]:
    """Return the model of a checkpoint, ready for evaluation, on a GPU if there is one; and its tokenizer.

    Args:
        checkpoint: the file.
        allow_code: packages whose classes it may name, next to those of seqarch and plug-ins.

    Raises:
        UserError: the file is no checkpoint, or its model cannot be built here.
    """
    content = read_checkpoint(checkpoint)
    import_mixers()
    try:
        options = yaml.safe_dump({"model": model_options(content)}, sort_keys=False)
        check_given(model_parser(), of_text(options), allow_code)
        lm = build_module(content, allow_code).lm
    except (UserError, ArgumentError, RuntimeError, yaml.YAMLError) as error:
        raise UserError(f"the model of {checkpoint} cannot be built here: {first_sentence(str(error))}") from error
    assert lm is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return lm.to(device).eval(), load_tokenizer(content["seqarch"]["tokenizer"])


def generate_text(
    lm: SequenceLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = 200,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Yield the prompt and what the model adds to it, in pieces of text as they come.

    Args:
        lm: from `load`, as is `tokenizer`.
        prompt: text to continue.
        max_new_tokens: how many tokens to draw.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among the k most likely tokens.
        seed: seed of the draw.
    """
    if not prompt:
        raise UserError("--prompt is empty: give some text to continue")
    check_counts(**{"--max_new_tokens": max_new_tokens})
    device = next(lm.parameters()).device
    ids = tokenizer.encode(prompt)
    tokens = generate(
        lm,
        torch.tensor([ids], device=device),
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator(device).manual_seed(seed),
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
