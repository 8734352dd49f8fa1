"""Tokenizers that are files, from a path or the Hugging Face Hub: `seqarch.data.codecs` has their kinds.

Only data are read: no code of a tokenizer's repository runs. A copy of the file stays with all that it was used for
(shards, checkpoints, run folders), next to a description:

tokenizer/seqarch_tokenizer.json     kind, checksum, number of entries, the tokens that begin and end a document
tokenizer/tokenizer.json             or tokenizer.model, tekken.json, vocab.tiktoken, rwkv_vocab.txt
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqarch.data.codecs import CODECS, EXTRA, Codec, kind_of
from seqarch.data.remote import fetch
from seqarch.data.tokenizers import CodecTokenizer, Tokenizer, known_tokenizers, load_tokenizer
from seqarch.errors import UserError, absent, one_line, one_of, refused, unknown
from seqarch.runs.files import Checked, check_folder, parse_json, read_json

FOLDER, DESCRIPTION = "tokenizer", "seqarch_tokenizer.json"
CONFIG = "tokenizer_config.json"
WHOLE = (
    "tokenizer.json",
    "tekken.json",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "*.tiktoken",
    "rwkv_vocab*.txt",
)
"""The files in a folder that are a tokenizer each; the first that is there counts."""
OLD = ("vocab.json", "merges.txt", "vocab.txt", "special_tokens_map.json", "added_tokens.json", "config.json")
"""What transformers makes a tokenizer.json of, with `CONFIG`."""
HUB_NAME = re.compile(r"([\w.-]+/)?[\w.-]+")

Read = Callable[[str], bytes]
"""The content of one of the two files by its name; `OSError` or `KeyError` if it is missing."""


@dataclass(frozen=True)
class Description(Checked):
    """All that the ids of a tokenizer depend on, and which begin and end a document; `sha256` is of the file."""

    kind: str
    sha256: str
    vocab_size: int
    eos_id: int
    bos_id: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in CODECS or not max(self.eos_id, self.bos_id or 0) < self.vocab_size < 2**31:
            raise TypeError("a kind or an id is unknown")


class FileTokenizer(CodecTokenizer):
    """A tokenizer in a file. Its name has the first digits of its digest, so equal names are equal ids.

    Args:
        description: what is known of it.
        read: reads its file.
        where: it lies, for messages.

    Raises:
        UserError: at the first text, if the file is missing or another one, or its library is not installed.
    """

    def __init__(self, description: Description, read: Read, where: str) -> None:
        self._description, self._read, self._where = description, read, where
        text = json.dumps(dataclasses.asdict(description), sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.name = f"{description.kind}-{self.digest[:12]}"
        self.vocab_size, self.eos_id, self.bos_id = description.vocab_size, description.eos_id, description.bos_id

    @functools.cached_property
    def files(self) -> Mapping[str, bytes]:
        name = CODECS[self._description.kind].file
        content = _content(self._read, name, self._where)
        if hashlib.sha256(content).hexdigest() != self._description.sha256:
            raise UserError(f"{name} in {self._where} is not the file of the tokenizer {self.name}: restore it")
        text = json.dumps(dataclasses.asdict(self._description), indent=2) + "\n"
        return {name: content, DESCRIPTION: text.encode()}

    @functools.cached_property
    def codec(self) -> Codec:
        kind = CODECS[self._description.kind]
        codec = kind(self.files[kind.file], f"{kind.file} in {self._where}")
        if codec.vocab_size != self.vocab_size:
            raise UserError(f"{kind.file} in {self._where} has {codec.vocab_size:,} entries, not {self.vocab_size:,}")
        return codec


def _content(read: Read, name: str, where: str) -> bytes:
    with refused(f"the tokenizer's file {name} is missing in {where}: restore it", OSError, KeyError):
        return read(name)


@functools.cache
def stored_tokenizer(name: str, folder: Path) -> Tokenizer:
    """The tokenizer called `name`, whose files, if it has any, are in a folder; errors as those of `tokenizer_from`."""
    return tokenizer_from(name, functools.partial(_from_folder, folder), str(folder))


def _from_folder(folder: Path, name: str) -> bytes:
    path = folder / name
    sha256 = None if name == DESCRIPTION else read_json(folder / DESCRIPTION)["sha256"]
    with contextlib.suppress(FileNotFoundError):  # the work folder of a mirror is not in object storage
        fetch(path, sha256)
    return path.read_bytes()


def tokenizer_from(name: str, read: Read, where: str) -> Tokenizer:
    """The tokenizer called `name`, whose files, if it has any, `read` returns.

    Raises:
        UserError: there is no such tokenizer, or the files are missing or those of another one.
    """
    if name.rpartition("-")[0] not in CODECS:
        return load_tokenizer(name)
    content = parse_json(_content(read, DESCRIPTION, where), Path(where, DESCRIPTION))
    with refused(f"{DESCRIPTION} in {where} describes no tokenizer", TypeError, why=True):
        tokenizer = FileTokenizer(Description(**content), read, where)
    if tokenizer.name != name:
        raise UserError(f"{where} holds the tokenizer {tokenizer.name}, not {name}: restore it")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a copy of a tokenizer's files, if it has any."""
    for name, content in tokenizer.files.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def find_tokenizer(name: str, eos_token: str | None = None, bos_token: str | None = None) -> Tokenizer:
    """The tokenizer that a user names.

    Args:
        name: 'byte', 'mixtral', the name of a plug-in's, a file, a folder in the layout of Hugging Face, or the name
            of a repository of the Hub.
        eos_token: the token that ends a document, where the tokenizer does not say it or another one shall.
        bos_token: the same for the token that begins it; "" for none.

    Raises:
        UserError: there is no such tokenizer, its files or its library are missing, or it has no such token.
    """
    if name in known_tokenizers():
        if eos_token is not None or bos_token is not None:
            raise UserError(f"'{name}' has its own tokens around documents: leave out the flags for them")
        return load_tokenizer(name)
    place = Path(name) if name and Path(name).exists() else _download(name)
    check_folder(place, written=False)
    path, content = _file_in(place) if place.is_dir() else (place, place.read_bytes())
    kind = kind_of(path, content)
    codec = CODECS[kind](content, path)
    config = read_json(path.with_name(CONFIG)) if path.with_name(CONFIG).is_file() else {}
    bos_id, eos_id = _around(codec, config, eos_token, bos_token, name)
    description = Description(kind, hashlib.sha256(content).hexdigest(), codec.vocab_size, eos_id, bos_id)
    return FileTokenizer(description, {codec.file: content}.__getitem__, name)


def _around(
    codec: Codec, config: Mapping[str, Any], eos_token: str | None, bos_token: str | None, name: str
) -> tuple[int | None, int]:
    """The ids that begin and end a document: as the user says, else `tokenizer_config.json`, else the file."""
    special = ", ".join(list(codec.special_tokens())[:20]) or "none"

    def id_of(token: str) -> int:
        if (found := codec.id_of(token)) is None:
            raise UserError(f"the tokenizer {name} has no token '{token}'; its special tokens are {special}")
        return found

    def chosen(flag: str | None, which: str, own: int | None) -> int | None:
        token = flag or config.get(which)
        token = token.get("content") if isinstance(token, dict) else token
        return id_of(token) if isinstance(token, str) else own

    bos_id, eos_id = codec.around()
    begins = bool(bos_token) if bos_token is not None else config.get("add_bos_token", bos_id is not None)
    bos_id, eos_id = chosen(bos_token, "bos_token", bos_id), chosen(eos_token, "eos_token", eos_id)
    if eos_id is None:
        raise UserError(f"{name} does not say which token ends a document: name one with --eos_token, of {special}")
    return bos_id if begins else None, eos_id


def _file_in(folder: Path) -> tuple[Path, bytes]:
    """The tokenizer in a folder, converted to tokenizer.json if it is in an older layout."""
    if found := next((path for pattern in WHOLE for path in sorted(folder.glob(pattern))), None):
        return found, found.read_bytes()
    if not (folder / CONFIG).is_file() or not any((folder / name).is_file() for name in ("vocab.json", "vocab.txt")):
        raise UserError(f"{folder} holds no tokenizer: expected {one_of(WHOLE)}, or {CONFIG} with a vocab.json")
    with refused(f"{folder} has no tokenizer.json, and to make one needs transformers: {EXTRA}", ImportError):
        from transformers import AutoTokenizer
    # transformers raises many kinds for files that do not fit
    with refused(f"{folder} has no tokenizer.json, and none can be made", Exception, why=True):
        made = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return folder / "tokenizer.json", made.backend_tokenizer.to_str().encode()


def _download(name: str) -> Path:
    """The folder with the tokenizer's files of a repository of the Hub; nothing else of it is fetched."""
    if difflib.get_close_matches(name, known_tokenizers()):
        raise unknown("tokenizer", name, known_tokenizers())
    if not HUB_NAME.fullmatch(name) or Path(name).suffix in (".json", ".model", ".tiktoken"):
        raise absent("tokenizer", name, "name a file, a folder or a repository of the Hugging Face Hub")
    with refused(f"there is no file '{name}', and to fetch it from the Hugging Face Hub needs: {EXTRA}", ImportError):
        from huggingface_hub import snapshot_download
    # huggingface_hub and its client raise many kinds
    message = f"there is no file '{name}', and the Hugging Face Hub gives no tokenizer of that name"
    with refused(message, Exception, why=lambda error: one_line(error).partition(". ")[0]):
        return Path(snapshot_download(name, allow_patterns=[CONFIG, *WHOLE, *OLD]))
