"""Tokenizers by name: UTF-8 bytes, Mixtral's 32,000 SentencePiece entries, and those of plug-ins.

`seqarch.data.tokenizer_files` has the others, which are files.
"""

import abc
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqarch import plugins
from seqarch.data.codecs import Codec, SentencePiece
from seqarch.errors import UserError, check_known, check_package

GROUP = "seqarch.tokenizers"
"""The entry points under which packages declare tokenizers."""


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    `name` stands in shards, checkpoints and run folders: tokenizers with one name give the same ids. `eos_id` ends
    every document in the shards and `bos_id`, if there is one, begins it; `encode` adds neither. A class of a plug-in
    (entry points of the group `seqarch.tokenizers`) takes no arguments, and its `name` is that of the class.
    """

    name: str
    vocab_size: int
    eos_id: int
    bos_id: int | None = None
    digest: str = ""
    """SHA-256 of all that the ids depend on; "" where the tokenizer is code, such as `byte`."""
    files: Mapping[str, bytes] = {}
    """What a copy of it consists of, by file name; nothing where it is code."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}' of {self.vocab_size:,} tokens>"

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    def check_fits(self, vocab_size: int) -> None:
        """Raise `UserError` for a model without logits for all of its tokens."""
        if vocab_size < self.vocab_size:
            has = f"the tokenizer '{self.name}' has {self.vocab_size:,} tokens"
            raise UserError(f"{has}: set model.vocab_size, {vocab_size:,}, to that, or take another tokenizer")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text in `dtype`, as `encode` gives them."""
        return [np.array(self.encode(text), self.dtype) for text in texts]

    @property
    def dtype(self) -> np.dtype:
        """The type of its ids in shards: 16 bits as long as they suffice, else 32."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<i4")


class ByteTokenizer(Tokenizer):
    """A token is a UTF-8 byte; 256 ends a document."""

    name = "byte"
    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(token) for token in ids if token < self.eos_id).decode(errors="replace")


class CodecTokenizer(Tokenizer):
    """A tokenizer whose codec reads its file at the first text: training on shards needs no library."""

    @property
    @abc.abstractmethod
    def codec(self) -> Codec:
        """Turns text into ids and back."""

    def encode(self, text: str) -> list[int]:
        return self.codec.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, self.dtype) for ids in self.codec.encode_batch(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.codec.decode([int(token) for token in ids if token < self.vocab_size])  # a padded model has more


class MixtralTokenizer(CodecTokenizer):
    """`tokenizer.model.v1` of mistral-common, read with SentencePiece."""

    name = "mixtral"
    vocab_size = 32_000
    eos_id = 2

    @functools.cached_property
    def codec(self) -> Codec:
        package = importlib.util.find_spec("mistral_common")
        if package is None or not package.submodule_search_locations:
            raise UserError("the tokenizer 'mixtral' needs the package mistral-common: pip install mistral-common")
        check_package("sentencepiece", "the tokenizer 'mixtral'", "sentencepiece")
        return SentencePiece(Path(package.submodule_search_locations[0], "data", "tokenizer.model.v1").read_bytes())


def begin_document(tokenizer: Tokenizer, ids: Sequence[int], *, alone: bool = False) -> list[int]:
    """The tokens of a text at the beginning of a document.

    Before them is the token that begins a document or, where none does, the EOS token of the document before. A model
    that read each document `alone` (`data.document_mask`) saw no text after an EOS token: an empty text begins with it.
    """
    if alone and tokenizer.bos_id is None and len(ids):
        return [*ids]
    return [tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id, *ids]


TOKENIZERS: dict[str, type[Tokenizer]] = {each.name: each for each in (ByteTokenizer, MixtralTokenizer)}


def known_tokenizers() -> list[str]:
    """The names of the tokenizers that are code."""
    return [*TOKENIZERS, *plugins.entries(GROUP)]


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: 'byte', 'mixtral', or the name of the class that a package declares.

    Raises:
        UserError: there is no such tokenizer, or its package cannot be imported.
    """
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    check_known("tokenizer", name, known_tokenizers())
    kind: Any = plugins.load(GROUP, name, Tokenizer)
    return kind()
