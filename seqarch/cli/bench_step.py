"""The process of `seqarch bench mixers` that times one recipe: options come as JSON, the row goes as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from seqarch.bench.rows import Row
from seqarch.bench.training_step import draw_tokens, time_training
from seqarch.cli.training import TrainingCLI
from seqarch.errors import UserError
from seqarch.model import SequenceLM
from seqarch.training import LanguageModel
from seqarch.training.callbacks.throughput import peak_tflops


def time_recipe(recipe: str, flags: list[str], steps: int) -> Row:
    """The row of a recipe: its model, built and compiled as `seqarch fit` does, on a GPU if there is one.

    Args:
        recipe: the file.
        flags: what is laid over it, as `--model.n_layers=2`.
        steps: steps to time after the first.

    Raises:
        UserError: what is wrong in the recipe or the flags.
    """
    cli = TrainingCLI(["--config", recipe, *flags], run=False)
    module, data = cli.model, cli.datamodule
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if on_gpu else "cpu")
    lm = build(module).to(device).train()
    tokens = draw_tokens(lm.vocab_size, data.micro_batch_size or 1, data.sequence_length, device)
    row = time_training(module, module.adamw(), tokens, steps)
    peak = peak_tflops(torch.cuda.get_device_name()) if on_gpu else None
    flops = lm.flops_per_token(data.sequence_length, training=True)
    return {
        "name": Path(recipe).stem,
        "model": ", ".join(dict.fromkeys(type(block.mixer).__name__ for block in lm.blocks)),
        "parameters": lm.n_parameters(),
        "mfu": row["tokens_per_s"] * flops / (peak * 1e12) if peak else None,
        **row,
    }


def build(module: LanguageModel) -> SequenceLM:
    """The module's model, compiled if it is to be."""
    module.configure_model()
    assert module.lm is not None
    return module.lm


def main(options: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore")
    try:
        row = time_recipe(**options)
    except UserError as error:
        row = {"error": str(error)}
    print(json.dumps(row))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
