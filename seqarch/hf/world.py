"""RWKV's World vocabulary for transformers; the package tokenizers has no model that takes the longest entry."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from seqarch.data.codecs import RWKVWorld

CODE = "modeling_seqarch"
"""The module in an exported folder that imports our classes, for `trust_remote_code=True`."""
LETTERS = bytes_to_unicode()
"""The letter for each byte, as byte-level tokenizers have it since GPT-2: itself if it prints, else from 256 on."""


def letters(entry: bytes) -> str:
    """The name of a token of these bytes."""
    return "".join(LETTERS[byte] for byte in entry)


class RWKVWorldTokenizer(PreTrainedTokenizer):
    """Each token is the longest entry that the rest of the text begins with.

    Args:
        vocab_file: RWKV's file.
        begins: put the token that ends a document before each text.
        options: those of `PreTrainedTokenizer`.
    """

    vocab_files_names: ClassVar = {"vocab_file": RWKVWorld.file}

    def __init__(self, vocab_file: str, *, begins: bool = True, **options: Any) -> None:
        self.content = Path(vocab_file).read_bytes()
        self.codec = RWKVWorld(self.content)
        self.names = {index: name for name, index in self.codec.special_tokens().items()}
        self.names |= {index: letters(entry) for index, entry in self.codec.entries.items()}
        self.ids = {name: index for index, name in self.names.items()}
        super().__init__(begins=begins, special_tokens_pattern="bos" if begins else "none", **options)

    @property
    def vocab_size(self) -> int:
        return self.codec.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {**self.ids, **self.added_tokens_encoder}

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        path = Path(save_directory, f"{filename_prefix}-{self.codec.file}" if filename_prefix else self.codec.file)
        path.write_bytes(self.content)
        return (str(path),)

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return self.codec.decode([self.ids[token] for token in tokens])

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self.names[index] for index in self.codec.encode(text)]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.names.get(index, "")
