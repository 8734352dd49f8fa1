"""The kinds of tokenizer files, each read by its own library and from memory."""

import abc
import ast
import base64
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from seqarch.errors import UserError, refused
from seqarch.runs.files import parse_json

EXTRA = "pip install 'seqarch[tokenizers]'"


class Codec(abc.ABC):
    """A tokenizer's file in its library. A text that reads like a special token is encoded as text.

    Args:
        content: of the file.
        where: the file as messages name it; by default `file`.
    """

    file: ClassVar[str]
    """The name of a copy of the file."""
    needs: ClassVar[tuple[str, ...]]
    """The modules of the library."""
    vocab_size: int

    def __init__(self, content: bytes, where: object = None) -> None:
        with refused(f"this tokenizer needs the package {self.needs[0]}: {EXTRA}", ImportError):
            for module in self.needs:
                import_module(module)
        # each library has errors of its own for a damaged file
        with refused(f"{where or self.file} cannot be read by {self.needs[0]}", Exception, why=True):
            self.read(content)

    @abc.abstractmethod
    def read(self, content: bytes) -> None: ...

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens."""

    @abc.abstractmethod
    def special_tokens(self) -> Mapping[str, int]: ...

    @abc.abstractmethod
    def around(self) -> tuple[int | None, int | None]:
        """The ids before and after a document, where the file says them."""

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name."""
        return self.special_tokens().get(token)


class TokenizerJson(Codec):
    """tokenizer.json of the package tokenizers: BPE, Unigram and WordPiece, with normalisers and added tokens."""

    file, needs = "tokenizer.json", ("tokenizers",)

    def read(self, content: bytes) -> None:
        from tokenizers import Tokenizer

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # there is a process for each core already
        self.model = Tokenizer.from_str(content.decode())
        self.model.encode_special_tokens = True
        self.model.no_truncation()
        self.model.no_padding()
        self.vocab_size = 1 + max(self.model.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        return self.model.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in self.model.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode(ids, skip_special_tokens=True)

    def special_tokens(self) -> Mapping[str, int]:
        return {each.content: i for i, each in self.model.get_added_tokens_decoder().items() if each.special}

    def id_of(self, token: str) -> int | None:
        return self.model.token_to_id(token)

    def around(self) -> tuple[int | None, int | None]:
        encoded = self.model.encode("a", add_special_tokens=True)
        ids, added = encoded.ids, encoded.special_tokens_mask
        if 0 not in added:  # no token of the text to tell before from after
            return None, None
        return ids[0] if added[0] else None, ids[-1] if added[-1] else None


class SentencePiece(Codec):
    """The .model file of SentencePiece."""

    file, needs = "tokenizer.model", ("sentencepiece",)

    def read(self, content: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self.model: Any = SentencePieceProcessor()
        with refused("it is not a .model file, or only a part of one", RuntimeError, raises=ValueError):
            self.model.LoadFromSerializedProto(content)  # the constructor takes an empty file for none
        self.vocab_size = self.model.vocab_size()

    def encode(self, text: str) -> list[int]:
        return self.model.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.model.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode(list(ids))

    def special_tokens(self) -> Mapping[str, int]:
        return {self.model.id_to_piece(i): i for i in range(self.vocab_size) if self.model.is_control(i)}

    def id_of(self, token: str) -> int | None:
        found = self.model.piece_to_id(token)
        return found if self.model.id_to_piece(found) == token else None

    def around(self) -> tuple[int | None, int | None]:
        return None, self.model.eos_id() if self.model.eos_id() >= 0 else None


class Tekken(Codec):
    """Mistral's Tekken file, read by mistral-common."""

    file, needs = "tekken.json", ("mistral_common", "tiktoken")

    def read(self, content: bytes) -> None:
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, self.file)
            path.write_bytes(content)
            self.model = Tekkenizer.from_file(path)
        self.vocab_size = self.model.n_words

    def encode(self, text: str) -> list[int]:
        return self.model.encode(text, bos=False, eos=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode(list(ids))

    def special_tokens(self) -> Mapping[str, int]:
        return {self.model.id_to_piece(i): i for i in range(self.model.num_special_tokens)}

    def around(self) -> tuple[int | None, int | None]:
        return None, self.model.eos_id


_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
_O200K_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"""[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_O200K_WORD}|"""
    rf"""[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_O200K_WORD}|"""
    r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_LLAMA3 = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"""
    r"""\s+(?!\S)|\s+"""
)
_END = "<|endoftext|>"
TIKTOKEN: dict[int, tuple[str, dict[str, int], int]] = {
    50_256: (_GPT2, {_END: 50_256}, 50_257),
    100_256: (_CL100K, {_END: 100_257}, 100_277),
    128_000: (_LLAMA3, {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001}, 128_256),
    151_643: (_LLAMA3.replace("{1,3}", ""), {_END: 151_643}, 151_851),
    199_998: (_O200K, {_END: 199_999}, 200_019),
}
"""What a tiktoken file does not say, by its number of entries: how text is split, the tokens around a document, and the
number of all ids. These are gpt2, cl100k_base, Llama 3, Qwen and o200k_base, from tiktoken 0.14 and the code that Meta
and Qwen publish with their files."""


class Tiktoken(Codec):
    """A file of the package tiktoken: on each line the bytes of an entry in base64, and its rank."""

    file, needs = "vocab.tiktoken", ("tiktoken",)

    def read(self, content: bytes) -> None:
        import tiktoken

        lines = (line.split() for line in content.splitlines() if line)
        self.ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        if len(self.ranks) not in TIKTOKEN:
            raise ValueError(f"how its {len(self.ranks):,} entries split text is not known: give a tokenizer.json")
        self.pattern, self.special, self.vocab_size = TIKTOKEN[len(self.ranks)]
        self.model = tiktoken.Encoding(
            self.file, pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens=self.special
        )

    def encode(self, text: str) -> list[int]:
        return self.model.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([token for token in ids if token < len(self.ranks)])

    def special_tokens(self) -> Mapping[str, int]:
        return self.special

    def around(self) -> tuple[int | None, int | None]:
        return None, max(self.special.values())


_WORLD_LINE = re.compile(r"""(?P<id>\d+) (?P<entry>b?(?P<quote>['"])(\\.|(?!(?P=quote)).)*(?P=quote)) (?P<size>\d+)""")


class RWKVWorld(Codec):
    """RWKV's World vocabulary: on each line an id, a Python literal, and its number of bytes.

    Each token is the longest entry that the rest of the text begins with. Id 0, which stands in no line, ends a
    document (ChatRWKV, tokenizer/rwkv_tokenizer.py).
    """

    file, needs = "rwkv_vocab.txt", ("seqarch",)

    def read(self, content: bytes) -> None:
        self.entries: dict[int, bytes] = {}
        for line in content.decode().splitlines():
            if not (parts := _WORLD_LINE.fullmatch(line)):
                raise ValueError(f"{line[:40]!r} is not an id, a literal and a number of bytes")
            value = ast.literal_eval(parts["entry"])
            entry = value.encode() if isinstance(value, str) else value
            if len(entry) != int(parts["size"]):
                raise ValueError(f"the entry {parts['id']} has {len(entry)} bytes, not {parts['size']}")
            self.entries[int(parts["id"])] = entry
        self.ids = {entry: index for index, entry in self.entries.items()}
        if missing := [byte for byte in range(256) if bytes([byte]) not in self.ids]:
            raise ValueError(f"no entry is the byte {missing[0]}")
        lengths: dict[bytes, set[int]] = {}
        for entry in self.ids:
            lengths.setdefault(entry[:2], {1}).add(len(entry))
        self.lengths = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}
        self.vocab_size = 1 + max(self.entries)

    def encode(self, text: str) -> list[int]:
        content, ids, at = text.encode(), [], 0
        while at < len(content):
            sizes = self.lengths.get(content[at : at + 2], (1,))
            size = next(size for size in sizes if content[at : at + size] in self.ids)
            ids.append(self.ids[content[at : at + size]])
            at += size
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.entries.get(token, b"") for token in ids).decode(errors="replace")

    def special_tokens(self) -> Mapping[str, int]:
        return {"<|rwkv_tokenizer_end_of_text|>": 0}

    def around(self) -> tuple[int | None, int | None]:
        return None, 0


CODECS: dict[str, type[Codec]] = {
    "tokenizer_json": TokenizerJson,
    "sentencepiece": SentencePiece,
    "tekken": Tekken,
    "tiktoken": Tiktoken,
    "rwkv_world": RWKVWorld,
}
"""By the name of their kind."""


def kind_of(path: Path, content: bytes) -> str:
    """The kind of a tokenizer's file.

    Raises:
        UserError: it is JSON, but no tokenizer.
    """
    found = parse_json(content, path) if path.suffix == ".json" else None
    if isinstance(found, dict) and "model" in found:
        return "tokenizer_json"
    if isinstance(found, dict) and {"config", "vocab"} <= found.keys():
        return "tekken"
    if path.suffix == ".json":
        raise UserError(f"{path} is neither a tokenizer.json nor a Tekken file: name one, or the folder that it is in")
    first = content.partition(b"\n")[0].split()
    if len(first) == 3 and first[0].isdigit() and first[2].isdigit():
        return "rwkv_world"
    return "tiktoken" if len(first) == 2 and first[1].isdigit() else "sentencepiece"
