"""Checkpoint files, checked before they are read."""

from __future__ import annotations

import hashlib
import pickle
import re
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser

from seqarch.errors import UserError
from seqarch.plugins import check_parsed, trust
from seqarch.runs.keys import difference, flatten, may_differ
from seqarch.safe_yaml import check_plain
from seqarch.training.module import LanguageModel

_COMMENT = b"seqarch sha256 "
"""Begins the comment of the zip archive that a checkpoint is; 64 hexadecimal digits follow."""
_LENGTH = 2
"""Bytes of the number that says how long the comment is. They end the archive that has none."""


def seal(path: Path) -> None:
    """Append the SHA-256 of a checkpoint to it, as the comment that ends a zip archive; PyTorch reads past it."""
    sealed = path.stat().st_size - _LENGTH
    comment = _comment(path, sealed)
    with path.open("r+b") as file:
        file.seek(sealed)
        file.write(comment)


def _comment(path: Path, sealed: int) -> bytes:
    """The length and the comment that belong behind the first `sealed` bytes of an archive."""
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


def damage(path: Path) -> str | None:
    """What is wrong with the file of a checkpoint, in words; `None` where it is as it was written.

    One without a SHA-256, written by an earlier version or by PyTorch, is held to the checksums of the zip archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            comment = archive.comment
            if not comment:
                return "its content differs from its checksums" if archive.testzip() else None
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, RuntimeError, zlib.error):
        return "it is cut short, damaged or no checkpoint"
    sealed = max(0, path.stat().st_size - _LENGTH - len(comment))
    with path.open("rb") as file:
        file.seek(sealed)
        return None if file.read() == _comment(path, sealed) else "its content differs from its checksum"


def check_checkpoint(path: str | Path) -> None:
    """Raise `UserError` for a file that is missing or damaged, and name the newest older one that is whole."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}")
    if (wrong := damage(path)) is None:
        return
    older = [each for each in sorted(path.parent.glob("step_*.ckpt")) if each.name < path.name]
    whole = next((each for each in reversed(older) if damage(each) is None), None)
    offer = f"to go on from the newest whole one, add --ckpt_path {whole} to the same command"
    raise UserError(f"{path} is damaged: {wrong}; {offer if whole else 'no older checkpoint is whole either'}")


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint on the CPU, running no code that it may contain (`weights_only`)."""
    check_checkpoint(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:  # PyTorch advises to load such a file without the check
        asked = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it asks for {asked[1]}, which may run code" if asked else "it holds more than tensors and plain values"
        raise UserError(f"{path} is no checkpoint of seqarch: {why}") from error
    except (RuntimeError, EOFError, KeyError) as error:
        raise UserError(f"{path} is no checkpoint of seqarch: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or "seqarch" not in content:
        raise UserError(f"{path} is no checkpoint of seqarch: it lacks the entry 'seqarch'")
    check_plain(f"{path}: 'hyper_parameters'", content.get("hyper_parameters"))
    return content


def build_module(content: Mapping[str, Any], allow: Collection[str] = ()) -> LanguageModel:
    """The `LanguageModel` that a checkpoint describes, with its weights, on the CPU and not compiled.

    Args:
        content: of the checkpoint, from `read_checkpoint`.
        allow: packages whose classes it may name beside those of seqarch and plug-ins.

    Raises:
        UserError: a class that a file may not name, or a function.
        ArgumentError: options that the model does not take.
        RuntimeError: weights of another model.
    """
    trust(allow)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(LanguageModel, "model")
    options = {key: value for key, value in content["hyper_parameters"].items() if not key.startswith("_")}
    config = parser.parse_object({"model": {**options, "compile": False}})
    check_parsed(config, allow)
    module = parser.instantiate_classes(config).model
    module.configure_model()
    module.load_state_dict(content["state_dict"])
    return module


def other_model(content: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """What a checkpoint's model has otherwise than the given one, in words; `None` where they are the same.

    Weights that fit do not tell: attention's fit Top-1 selection.

    Args:
        content: of the checkpoint.
        model: options of `LanguageModel`, mixers as `{class_path: ..., init_args: ...}`.
    """
    trained, given = (flatten(dict(options), "model") for options in (content["hyper_parameters"], model))
    keys = [key for key in trained if key in given and not may_differ(key, "checkpoint")]
    return difference(trained, given, keys)
