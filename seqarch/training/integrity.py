"""The SHA-256 of a checkpoint, kept in it and compared before it is read."""

import hashlib
import pickle
import zipfile
from pathlib import Path
from typing import Any

from seqarch.errors import UserError, absent
from seqarch.runs.folder import RECORD, is_sharded
from seqarch.training.sharded.folder import Damage, Folder, header
from seqarch.training.weights import SUFFIX

_COMMENT = b"seqarch sha256 "
"""The start of the comment in a checkpoint, which is a zip archive; 64 hexadecimal digits follow."""
_LENGTH = 2
"""Bytes of the number that says how long the comment is. An archive without a comment ends with them."""
_BYTES = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Bytes of a number, by the name of PyTorch's storage of such numbers."""


def seal(path: Path) -> None:
    """Append the SHA-256 of a checkpoint to it, as the comment that ends a zip archive; PyTorch reads past it.

    The index of a folder has it already.
    """
    if path.is_dir():
        return
    sealed = path.stat().st_size - _LENGTH
    comment = _comment(path, sealed)
    with path.open("r+b") as file:
        file.seek(sealed)
        file.write(comment)


def _comment(path: Path, sealed: int) -> bytes:
    """The length and the comment that must follow the first `sealed` bytes of an archive."""
    text = _COMMENT + _digest(path, sealed).encode()
    return len(text).to_bytes(_LENGTH, "little") + text


def _digest(path: Path, n_bytes: int) -> str:
    """SHA-256 of the first bytes of a file."""
    digest, block = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with path.open("rb") as file:
        while n_bytes and (read := file.readinto(block[: min(len(block), n_bytes)])):
            digest.update(block[:read])
            n_bytes -= read
    return digest.hexdigest()


def fingerprint(path: Path) -> str:
    """The SHA-256 in a checkpoint, or of its file if there is none in it."""
    if is_sharded(path):
        return Folder(path).sha256
    comment = b""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            comment = archive.comment
    return comment.removeprefix(_COMMENT).decode() if comment else _digest(path, path.stat().st_size)


def damage(path: Path) -> str | None:
    """The damage of a checkpoint, in words; `None` if it is as it was written.

    A file without a SHA-256, of an earlier version or of PyTorch, is compared with the checksums of the zip archive.
    PyTorch reads a tensor from where its record begins, so a record must hold it whole and as it is. A safetensors file
    has no checksums, only a header that its size must fit.
    """
    if path.is_dir() or path.suffix == SUFFIX:
        try:
            Folder(path).check_files() if path.is_dir() else header(path)
        except (Damage, UserError) as wrong:
            return str(wrong)
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            comment, records = archive.comment, {record.filename: record for record in archive.infolist()}
            if any(record.compress_type != zipfile.ZIP_STORED for record in records.values()):
                return "its records are compressed"
            if not comment and archive.testzip():
                return "its content differs from its checksums"
            (pickled,) = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
            sizes = _Sizes(archive.open(pickled)).read()
            folder = pickled.removesuffix(".pkl")
            if any(records[f"{folder}/{key}"].file_size < size for key, size in sizes.items()):
                return "its tensors are cut short"
            if not comment:
                return None
    except Exception:  # any error of zipfile and pickle on another person's file
        return "it is cut short or no checkpoint"
    sealed = max(0, path.stat().st_size - _LENGTH - len(comment))
    with path.open("rb") as file:
        file.seek(sealed)
        return None if file.read() == _comment(path, sealed) else "its content differs from its checksum"


class _Sizes(pickle.Unpickler):
    """Finds the bytes of each tensor's record in a checkpoint, building nothing and running no code of it."""

    def read(self) -> dict[str, int]:
        self.sizes: dict[str, int] = {}
        self.load()
        return self.sizes

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Nothing,), {})

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, count = pid
        self.sizes[str(key)] = count * _BYTES[kind.__name__.removesuffix("Storage")]
        return _Nothing()


class _Nothing(dict):
    """Stands for any object of a pickle."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def check_checkpoint(path: str | Path, *, files: bool = True) -> None:
    """Raise `UserError` for a checkpoint that is missing or, with `files`, damaged."""
    if "::" in str(path):  # Lightning would take it for a URL, whatever file is called so
        raise UserError(f"{path} holds '::', as a URL may: name a local file without it")
    path = Path(path)
    if not path.exists():
        raise absent("checkpoint", path)
    if not path.is_file() and not is_sharded(path):
        kind = "a run without checkpoints, as in an exam" if (path / RECORD).is_file() else "neither checkpoint nor run"
        raise UserError(f"{path} is {kind}: name a checkpoint, or a run with one")
    if files and (wrong := damage(path)) is not None:
        raise damaged(path, wrong)


def damaged(path: Path, wrong: str) -> UserError:
    """The error for a checkpoint with some damage, which names the newest older one that is whole."""
    older = (each for each in sorted(path.parent.glob("step_*.ckpt"), reverse=True) if each < path)
    whole = next((each for each in older if (each.is_file() or is_sharded(each)) and damage(each) is None), None)
    offer = f"the newest whole one is {whole}: remove the newer ones, and the same command goes on from it"
    return UserError(f"{path} is damaged: {wrong}; {offer if whole else 'restore it, or name another'}")
