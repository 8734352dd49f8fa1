"""Files that are whole or not there, and reading that names the file when it is damaged."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seqarch.errors import UserError


@contextlib.contextmanager
def atomic(path: Path, *, durable: bool = False, replace: bool = True) -> Iterator[Path]:
    """A path to write to instead of `path`; it takes the place of `path` when the block ends without an error.

    Args:
        path: the file to write; its folder is made if needed.
        durable: wait until the file and its name are on disk, so that they survive a crash of the machine.
        replace: whether this process puts the file in place; of several that write one file together, one does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        if not replace:
            return
        if durable:
            sync(partial)
        os.replace(partial, path)
        if durable:
            sync(path.parent)
    except BaseException:
        if replace:
            partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file that is whole or not there."""
    with atomic(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that is whole or not there."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        UserError: it is no UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text file (byte {error.start} is not UTF-8)") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: it is no JSON, or no object.
    """
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: malformed JSON: {error.msg}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected an object")
    return content


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
