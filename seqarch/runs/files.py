"""Writes files so that they are whole or absent, and names a file that is damaged when it is read."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqarch.errors import UserError, absent, in_utf8, one_line, refused

if TYPE_CHECKING:
    import numpy as np


LARGEST = 1 << 28
"""Bytes of the arrays in a file of evaluations; those of 10 million samples have 40 MB."""
MOST = 255
"""Letters of a name, as in the name of a file."""


@contextlib.contextmanager
def atomic(path: Path, *, durable: bool = False, replace: bool = True, folders: bool = False) -> Iterator[Path]:
    """A path to write to instead of `path`. The file, or folder, replaces `path` when the block ends without an error.

    Args:
        path: the file or folder to write; its folder is made if needed.
        durable: wait until the file and its name are on disk, so that they survive a crash of the machine.
        replace: whether this process puts the file in place. Only one does if several write it.
        folders: whether it may be a folder, and a folder that is in the way may go.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    clear = remove if folders else _unlink
    if replace:
        clear(partial)  # in another person's folder it may be a link to any file, or a FIFO
    try:
        yield partial
        if not replace:
            return
        if durable:
            sync(partial)
        if folders and path.is_dir():
            clear(path)  # no folder is replaced while it holds something
        os.replace(partial, path)
        if durable:
            sync(path.parent)
    except BaseException:
        if replace:
            clear(partial)
        raise


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        _unlink(path)


@contextlib.contextmanager
def replaced(folder: Path, names: Collection[str] = ()) -> Iterator[Path]:
    """A new folder to write several files to, which replace those in `folder` when the block ends without an error.

    Args:
        folder: made if needed.
        names: files of `folder` that are removed where the block wrote none of the name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as new:
        yield Path(new)
        written = sorted(path.name for path in Path(new).iterdir())
        for name in written:
            os.replace(Path(new, name), folder / name)
        for name in {*names} - {*written}:
            (folder / name).unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file that is whole or not there."""
    with atomic(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that is whole or not there."""
    write_text(path, json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def locked(lock: Path, refusal: str) -> Iterator[None]:
    """Hold a lock file.

    Raises:
        UserError: another process holds it, with `refusal`.
    """
    import filelock

    with refused(refusal, filelock.Timeout), filelock.FileLock(lock, timeout=0):
        yield


def refuse_place(option: str, place: str) -> None:
    """Refuse to write to a URL, or to a `~` that the shell has not replaced: a folder would have that name."""
    if re.match(r"\w+:/", place):  # `Path` makes one slash of two
        raise UserError(f"{option} {place} is a URL: name a local folder")
    if place.partition("/")[0] == "~":
        raise UserError(f"{option} {place} would make a folder named ~ here: write {os.path.expanduser(place)}")


def check_file(path: Path) -> None:
    """Raise `UserError` if a file that a user named is not there."""
    if not path.is_file():
        raise absent("file", path)


def check_new(place: Path, kind: str) -> None:
    """Raise `UserError` if there is something where a new "file" or "folder" is to be written: nothing is replaced."""
    if place.exists() and not (kind == "folder" and place.is_dir() and not any(place.iterdir())):
        raise UserError(f"{place} exists: name a new {kind}")


def check_folder(folder: Path, within: Path | None = None, *, written: bool = True) -> None:
    """Raise `UserError` for what a folder of another person may hold to harm us. Call it once, before a file is opened.

    That is a FIFO, a socket or a device, which a reader would wait for, and a link to where seqarch would write.

    Args:
        folder: with what is in it.
        within: the folder that the user named, if `folder` is one in it; then `folder` may not lead out of that.
        written: whether seqarch writes into it. Otherwise links may lead out of it.
    """
    if written and folder.is_file():
        raise UserError(f"{folder} is a file: name a folder")
    for path in (folder, *folder.rglob("*")):
        home = within if path == folder else folder
        leads_out = home and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(home))
        if written and leads_out and path.is_symlink():
            raise UserError(f"{path} is a link that leads out of the folder, where seqarch would write: remove it")
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{path} is neither a file nor a folder: remove it")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        UserError: it is not UTF-8 text.
    """
    with in_utf8(path):
        return path.read_text(encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: it is not JSON, or not an object.
    """
    return parse_object(read_text(path), path)


def read_arrays(path: Path, only: Collection[str] | None = None) -> "dict[str, np.ndarray]":
    """The arrays in an .npz file by name, all or `only` some.

    Raises:
        UserError: it cannot be read, or holds Python objects.
    """
    import numpy as np  # a quarter of the start of `seqarch --help`

    # numpy and zipfile raise many kinds for a damaged file
    with refused(f"{path} is damaged: remove it", Exception), np.load(path) as file:
        return {name: file[name] for name in only or file}


def read_numbers(path: Path) -> "dict[str, np.ndarray]":
    """The lists of numbers `[n]` in an .npz file of another person's `evaluations/`, by name.

    Raises:
        UserError: it cannot be read, unfolds to more than `LARGEST` bytes, or an array is not a list of finite numbers.
    """
    import numpy as np

    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        if sum(part.file_size for part in archive.infolist()) > LARGEST:
            raise UserError(f"{path} unfolds to more than {LARGEST >> 20} MiB: remove it")
    arrays = read_arrays(path)
    for name, array in arrays.items():
        if not (array.ndim == 1 and len(array) and array.dtype.kind in "biuf" and np.isfinite(array).all()):
            raise UserError(f"{path} is damaged: {name[:MOST]!r} is not a list of finite numbers; remove it")
    return arrays


def is_label(text: Any) -> bool:
    """Whether this is text for a figure, a table or a terminal: no control characters, at most `MOST` letters."""
    return isinstance(text, str) and text.isprintable() and len(text) <= MOST


def write_arrays(path: Path, arrays: Mapping[str, Any], *, compressed: bool = False) -> None:
    """Write what `read_arrays` reads, completely or not at all."""
    import numpy as np

    with atomic(path) as partial, partial.open("wb") as file:
        (np.savez_compressed if compressed else np.savez)(file, **arrays)


def parse_json(text: str | bytes, path: Path, line: int = 1) -> Any:
    """The value that JSON text holds.

    Args:
        text: the text.
        path: the file that holds it, for the message.
        line: where in the file it begins.

    Raises:
        UserError: it is not JSON, or not Unicode text; the message names file and line.
    """
    with in_utf8(path, line):
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        content = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except (ValueError, RecursionError) as error:  # also text that is not Unicode, or a number with too many digits
        line += getattr(error, "lineno", 1) - 1
        raise UserError(f"{path}:{line}: is not JSON ({one_line(error)[:200]})") from None


def parse_object(text: str | bytes, path: Path, line: int = 1) -> dict[str, Any]:
    """The object that JSON text holds; arguments and errors as `parse_json`, and `UserError` for any other value."""
    content = parse_json(text, path, line)
    if not isinstance(content, dict):
        raise UserError(f"{path}:{line}: expected an object, {{...}}, not {kind_of_json(content)}")
    return content


def kind_of_json(value: Any) -> str:
    """How JSON calls the type of a value, or Python if JSON has no such values."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return {**names, int: "a number", float: "a number"}.get(type(value), type(value).__name__)


@dataclasses.dataclass(frozen=True)
class Checked:
    """Fields of JSON by other people: each has the type that it is declared with, and numbers are 0 or more.

    Raises:
        TypeError: one is something else.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, declared = getattr(self, field.name), field.type
            kind: Any = int | float if declared is float else getattr(declared, "__origin__", declared)
            if not isinstance(value, kind) or (isinstance(value, int | float) and not 0 <= value < 2**53):
                raise TypeError(f"{field.name} is {value!r:.80}")


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
