"""Small models with random weights, exported without training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import seqarch
from seqarch.data.tokenizers import Tokenizer
from seqarch.experiment.load import module_of
from seqarch.model import SequenceLM
from seqarch.training.checkpoint import tokenizer_files
from seqarch.training.weights import write_weights
from tests.cli.conftest import finished, refuse, run_dir  # noqa: F401 - fixtures

FEED_FORWARD = {"class_path": "seqarch.model.GeGLU"}


class Exported(NamedTuple):
    """A model, its checkpoint and the folder that it was exported to."""

    lm: SequenceLM
    checkpoint: Path
    folder: Path


def facts(mixers: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What a checkpoint of a small model says of it."""
    model = {"vocab_size": 257, "d_model": 32, "n_layers": 2, "mixers": mixers, "feed_forward": FEED_FORWARD}
    return {
        "seqarch": {"version": seqarch.__version__, "precision": "32-true", "tokenizer": "byte"},
        "hyper_parameters": {**model, **options},
        "global_step": 3,
        "TextDataModule": {"sequence_length": 48},
    }


def checkpoint(
    folder: Path,
    mixers: dict[str, Any],
    allow_code: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Path:
    """A file with such a model, whose weights are large enough that tokens differ."""
    content, path = facts(mixers, **options), folder / "model.safetensors"
    module = module_of(content, allow_code)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.3) if weight.ndim > 1 else weight.data.add_(0.1 * torch.randn_like(weight))
    if tokenizer is not None:
        content["seqarch"]["tokenizer"] = tokenizer.name
    write_weights(path, content, module.state_dict(), tokenizer and tokenizer_files(tokenizer)["tokenizer_files"])
    return path


@pytest.fixture
def exported(tmp_path):
    """Exports a small model."""
    from seqarch.hf.export import export

    def make(mixers: dict[str, Any], **options: Any) -> Exported:
        path = checkpoint(tmp_path, mixers, **options)
        return Exported(seqarch.load(path)[0].cpu(), path, export(path, tmp_path / "exported"))

    return make
