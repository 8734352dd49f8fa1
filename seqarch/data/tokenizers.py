"""Tokenizers: UTF-8 bytes, and Mixtral's 32,000 SentencePiece entries. Both fit 16-bit shards."""

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from seqarch.errors import UserError, unknown


class Tokenizer(Protocol):
    """The interface that shards need from a tokenizer. `eos_id` closes every document; `encode` never adds it."""

    name: str
    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text as uint16, without `eos_id`."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
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


class MixtralTokenizer:
    """`tokenizer.model.v1` of mistral-common, read with SentencePiece on first use.

    Only `encode` and `decode` import the two packages, so training on shards needs neither.
    """

    name = "mixtral"
    vocab_size = 32_000
    eos_id = 2

    @functools.cached_property
    def _model(self):
        package = importlib.util.find_spec("mistral_common")
        if package is None or not package.submodule_search_locations:
            raise UserError("the tokenizer 'mixtral' needs the package mistral-common: pip install mistral-common")
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise UserError("the tokenizer 'mixtral' needs a package: pip install sentencepiece") from error
        path = Path(package.submodule_search_locations[0], "data", "tokenizer.model.v1")
        return SentencePieceProcessor(model_file=str(path))

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, np.uint16) for ids in self._model.encode(list(texts), num_threads=1)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(token) for token in ids])


def begin_document(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The tokens of a text at the beginning of a document, which follows the EOS token of the document before it."""
    return [tokenizer.eos_id, *ids]


TOKENIZERS = {tokenizer.name: tokenizer for tokenizer in (ByteTokenizer, MixtralTokenizer)}


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: 'byte' or 'mixtral'.

    Raises:
        UserError: there is no such tokenizer.
    """
    if not isinstance(name, str) or name not in TOKENIZERS:
        raise unknown("tokenizer", str(name), TOKENIZERS)
    return TOKENIZERS[name]()
