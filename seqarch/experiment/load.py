"""A trained model from a checkpoint, and the text that it writes."""

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from jsonargparse import ArgumentParser, Namespace

from seqarch.arguments import Count, Interval, typed
from seqarch.data.tokenizers import Tokenizer, begin_document
from seqarch.errors import UserError, refused, several
from seqarch.experiment.checker import first_sentence, parse_tree
from seqarch.experiment.parser import plain
from seqarch.experiment.tree import read_plain
from seqarch.mixers.registry import import_parts
from seqarch.model import SequenceLM, stream
from seqarch.model.decoder import check_drawn
from seqarch.plugins import check_parsed
from seqarch.runs.folder import config_of, named_checkpoint
from seqarch.training import LanguageModel
from seqarch.training.checkpoint import model_options, other_model, read_checkpoint, tokenizer_of


@typed
def load(checkpoint: str | Path, allow_code: str | Collection[str] = ()) -> tuple[SequenceLM, Tokenizer]:
    """Return the model of a checkpoint, ready for evaluation, and its tokenizer. The model is on a GPU if there is one.

    Args:
        checkpoint: the file, or one of `seqarch export --weights`; of a run folder the newest checkpoint.
        allow_code: packages whose classes it may name, next to those of seqarch and plug-ins.

    Raises:
        UserError: the file is not a checkpoint, or its model cannot be built here.
    """
    checkpoint = named_checkpoint(checkpoint)
    return load_content(read_checkpoint(checkpoint), checkpoint, several(allow_code))


def load_content(
    content: Mapping[str, Any], checkpoint: Path, allow_code: Collection[str] = ()
) -> tuple[SequenceLM, Tokenizer]:
    """`load` for a checkpoint that was read.

    Raises:
        UserError: its model cannot be built here, or is not that of the run folder that it lies in.
    """
    wrong = f"the model of {checkpoint} cannot be built here"
    with refused(wrong, UserError, RuntimeError, why=lambda error: first_sentence(str(error))):
        module = module_of(content, allow_code)
        module.load_state_dict(content["state_dict"])
        lm = module.built()
        lm.document_mask = bool((content.get("TextDataModule") or {}).get("document_mask"))
        tokenizer = tokenizer_of(content)
        check_model(lm, tokenizer)
    config, complete = config_of(checkpoint), lambda old: {"model": complete_model(old["model"], allow_code)}
    if "model" in config and (other := other_model(content, {"model": config["model"]}, complete)):
        raise UserError(f"{checkpoint} holds another model than its run ({other}): move it out of the run folder")
    return lm.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def module_of(content: Mapping[str, Any], allow_code: Collection[str] = ()) -> LanguageModel:
    """Build the `LanguageModel` that a checkpoint describes, with new weights, neither compiled nor in FP8.

    Raises:
        UserError: an option is wrong, or a class is not installed or may not be named.
    """
    import_parts()
    options = _parsed(model_options(content), allow_code)
    check_parsed(options, allow_code)
    module = _parser().instantiate(options).model
    module.prepare_inference()
    module.configure_model()
    return module


def complete_model(options: Mapping[str, Any], allow_code: Collection[str] = ()) -> dict[str, Any]:
    """The options of a model with their defaults, as plain values."""
    return plain(_parser(), _parsed(options, allow_code))["model"]


def _parsed(options: Mapping[str, Any], allow_code: Collection[str]) -> Namespace:
    return parse_tree(_parser(), read_plain({"model": options}, "its model", arrays=False), allow_code)


@functools.cache
def _parser() -> ArgumentParser:
    """The parser of the options of a `LanguageModel`, made once for a process."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(LanguageModel, "model")
    return parser


def check_model(lm: SequenceLM, tokenizer: Tokenizer) -> None:
    """Raise `UserError` for a model that lacks tokens of its tokenizer, or has a weight that is not finite."""
    tokenizer.check_fits(lm.vocab_size)
    for name, weight in lm.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"its weight {name} is not finite, as after a training that diverged")


@typed
def generate_text(
    lm: SequenceLM, tokenizer: Tokenizer, prompt: str, max_new_tokens: Count = 200, **options
) -> Iterator[str]:
    """Yield the prompt and what the model adds to it, in pieces of text as they come; arguments as `generate_texts`.

    The prompt comes with the first piece, so that what cannot be generated is refused before anything is yielded.
    """
    pieces = generate_texts(lm, tokenizer, [prompt], max_new_tokens, **options)
    added = (piece for _, piece in pieces if piece is not None)
    return itertools.chain([prompt, next(added, "")], added)


@typed
def generate_texts(
    lm: SequenceLM,
    tokenizer: Tokenizer,
    prompts: str | Sequence[str],
    max_new_tokens: Count = 200,
    *,
    stop: str | Sequence[str] = (),
    temperature: float = 0.8,
    seed: Annotated[int, Interval(0, 2**64 - 1, "[]")] | None = None,
    **options,
) -> Iterator[tuple[int, str | None]]:
    """Yield the index of a prompt and the next piece of what the model adds to it; `None` where it ends.

    The model reads each prompt as the beginning of a document, as `seqarch eval` does: after the token that begins one
    or, where none does, one EOS token.

    Args:
        lm: from `load`, as is `tokenizer`.
        tokenizer: of the model.
        prompts: texts to continue.
        max_new_tokens: most tokens to draw for each.
        stop: a text, or several, before which a continuation ends.
        temperature: divides the logits; 0 takes the most likely token.
        seed: seed of the draws, which depend on the batch as well; 0 if not given.
        **options: as of `seqarch.model.stream` and `seqarch.model.Decoder`.

    Raises:
        UserError: a prompt is empty or not text, or an option is out of range.
    """
    check_drawn(temperature, seed=seed)
    seed = seed or 0
    prompts, stop = several(prompts), several(stop)
    if not all(stop):
        raise UserError("a stop text is empty: give at least one character")
    for text in (*prompts, *stop):
        with refused(f"the text {text!r} is not UTF-8", UnicodeEncodeError):
            text.encode()
    writers = [_Writer(tokenizer, prompt, stop) for prompt in prompts]
    device = lm.embedding.weight.device
    begun = (begin_document(tokenizer, writer.ids, alone=lm.document_mask) for writer in writers)
    ids = [torch.tensor(each, device=device) for each in begun]
    options |= {"temperature": temperature, "generator": torch.Generator(device).manual_seed(seed)}
    drawn = stream(lm, ids, max_new_tokens, stop=lambda row, new: writers[row].ended, **options)
    return _pieces(drawn, writers, max_new_tokens)


def _pieces(
    drawn: Iterator[tuple[int, int]], writers: "list[_Writer]", max_new_tokens: int
) -> Iterator[tuple[int, str | None]]:
    for row, token in drawn:
        writer = writers[row]
        yield row, writer.add(token)
        if writer.ended or writer.count == max_new_tokens:
            yield row, writer.rest()
            yield row, None


class _Writer:
    """Turns the tokens that continue a prompt into text: whole characters, up to a stop text."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, stop: Sequence[str]) -> None:
        if not prompt:
            raise UserError("a prompt is empty: give some text to continue")
        self.tokenizer = tokenizer
        self.stop = stop
        self.ids = tokenizer.encode(prompt)
        self.before = tokenizer.decode(self.ids)
        self.new = self.shown = ""
        self.count = 0
        self.ended = False

    def add(self, token: int) -> str:
        """The text to show after one more token, without an unfinished character or the start of a stop text."""
        self.count += 1
        if token == self.tokenizer.eos_id:
            self.ended = True
            return ""
        self.ids.append(token)
        self.new = self.tokenizer.decode(self.ids)[len(self.before) :]
        found = [at for at in map(self.new.find, self.stop) if at >= 0]
        if found:
            self.new, self.ended = self.new[: min(found)], True
        if self.ended or self.new.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        begun = (size for text in self.stop for size in range(len(text)) if self.new.endswith(text[:size]))
        return self._show(len(self.new) - max(begun, default=0))

    def rest(self) -> str:
        """The text that was held back."""
        return self._show(len(self.new))

    def _show(self, until: int) -> str:
        piece = self.new[len(self.shown) : until]
        self.shown += piece
        return piece
