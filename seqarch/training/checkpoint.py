"""Checkpoint files, checked before they are read."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from seqarch.errors import UserError
from seqarch.runs.keys import difference, flatten, may_differ


def check_checkpoint(path: str | Path) -> None:
    """Raise `UserError` for a file that is missing or no complete checkpoint, and offer the one written before it."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}")
    if not zipfile.is_zipfile(path):
        older = [each for each in sorted(path.parent.glob("step_*.ckpt")) if each.name < path.name]
        offer = f"the one before it is {older[-1]}" if older else "there is no older one beside it"
        raise UserError(f"{path} is damaged or no checkpoint; {offer}")


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint on the CPU, running no code that it may contain (`weights_only`)."""
    check_checkpoint(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError) as error:
        raise UserError(f"{path} is no checkpoint of seqarch: {str(error).splitlines()[0]}") from error
    if "seqarch" not in content:
        raise UserError(f"{path} is no checkpoint of seqarch: it lacks the entry 'seqarch'")
    return content


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
