"""A model as a safetensors file: its weights, and what a reader needs to build it, in the file's metadata.

The format holds tensors and texts only, so reading it runs no code.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from seqarch.errors import UserError, one_line, refused
from seqarch.runs.files import atomic, check_file, parse_object

SUFFIX = ".safetensors"
HEAD, EMBEDDING = "lm.head.weight", "lm.embedding.weight"
"""Two names of one tensor where the head shares the embedding's weights; a file holds the second."""
PUBLIC = ("version", "precision", "tokenizer", "hold_outs", "sources")
"""What a file tells of the training next to its options: no folder of the machine that trained."""
_KEY = "seqarch"
FILES = "tokenizer_files."
"""Before the names of the tokenizer's files among the tensors."""


class OtherWeights(RuntimeError):
    """Weights that do not fit the model."""


@contextmanager
def fitting() -> Iterator[None]:
    """Around the loading of weights: raise `OtherWeights` with the first that PyTorch names; it has no class for it."""
    try:
        yield
    except RuntimeError as error:
        raise OtherWeights(one_line(str(error).partition(":")[2]).partition(". ")[0]) from error


def facts_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a checkpoint that describe its model, as plain values without the weights."""
    data = content.get("TextDataModule") or {}
    return {
        "seqarch": {name: content["seqarch"][name] for name in PUBLIC if name in content["seqarch"]},
        "hyper_parameters": dict(content["hyper_parameters"]),
        "global_step": content["global_step"],
        "TextDataModule": {name: data.get(name) for name in ("sequence_length", "document_mask")},
    }


def write_weights(
    path: Path, facts: Mapping[str, Any], weights: Mapping[str, Tensor], files: Mapping[str, Tensor] | None = None
) -> None:
    """Write weights, the facts of `facts_of`, and the bytes of the tokenizer's files, if it has any."""
    tied = HEAD in weights and weights[HEAD].data_ptr() == weights[EMBEDDING].data_ptr()
    kept = {name: each.detach().cpu().clone() for name, each in weights.items() if not (tied and name == HEAD)}
    kept |= {FILES + name: each.clone() for name, each in (files or {}).items()}
    with atomic(path) as partial:
        write_tensors(partial, kept, {_KEY: json.dumps(facts)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, with facts in its metadata, that those may read who may read a new file."""
    with storage_errors():
        path.touch()
        mode = path.stat().st_mode
        save_file(dict(tensors), path, {"format": "pt", **(facts or {})})  # safetensors lets only the owner read it
        path.chmod(mode)


def save(path: Path, content: Any) -> None:
    """Write with `torch.save`."""
    with storage_errors(), path.open("wb") as file:
        torch.save(content, file)


def storage_errors() -> AbstractContextManager[None]:
    """Raise the `OSError` of a full disk in place of what PyTorch and safetensors make of it."""

    def of_system(text: str) -> Exception:
        number = re.search(r"(?:os error |Errno )(\d+)", text)
        return OSError(int(number[1]), os.strerror(int(number[1]))) if number else RuntimeError(text)

    def cause(error: Exception) -> BaseException:
        return error.__context__ if isinstance(error.__context__, OSError) else error

    return refused("not written", RuntimeError, SafetensorError, why=cause, raises=of_system)


def write_content(path: Path, content: Mapping[str, Any]) -> None:
    """Write the weights, the facts and the tokenizer of a checkpoint."""
    write_weights(path, facts_of(content), content["state_dict"], content["seqarch"].get("tokenizer_files"))


def read_weights(path: str | Path) -> dict[str, Any]:
    """The entries of a checkpoint from a file of `write_weights`.

    Raises:
        UserError: the file is missing or damaged, or was not written by seqarch.
    """
    path = Path(path)
    found, weights = read_safetensors(path)
    if _KEY not in found:
        raise UserError(f"{path} was not written by seqarch: `seqarch import` reads the folder of another model")
    content = parse_object(found[_KEY], path)
    files = {name.removeprefix(FILES): weights.pop(name) for name in list(weights) if name.startswith(FILES)}
    if files and isinstance(content.get("seqarch"), dict):
        content["seqarch"]["tokenizer_files"] = files
    return {**content, "state_dict": with_head(weights)}


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors, which stay on disk until they are read.

    Raises:
        UserError: the file is missing or damaged.
    """
    check_file(path)
    wrong = f"{path} is damaged or not a safetensors file"
    with refused(wrong, SafetensorError, why=True), safe_open(path, "pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def with_head(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights as a model takes them, whose head may share those of its embedding."""
    return {HEAD: weights[EMBEDDING], **weights} if EMBEDDING in weights else dict(weights)
