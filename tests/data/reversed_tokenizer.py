"""A tokenizer as a package may declare it."""

from collections.abc import Sequence

from seqarch.data.tokenizers import Tokenizer


class Reversed(Tokenizer):
    """Bytes from the last to the first."""

    name, vocab_size, eos_id = "Reversed", 257, 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())[::-1]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in reversed(ids) if token < 256).decode()
