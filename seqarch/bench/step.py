"""The process of `seqarch bench mixers` that times one recipe: options come as JSON, the row goes as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from seqarch.bench.rows import Row
from seqarch.bench.training_step import draw_tokens, time_training
from seqarch.errors import UserError
from seqarch.experiment.experiment import Experiment
from seqarch.training.callbacks.throughput import peak_tflops


def time_recipe(recipe: str, overrides: dict[str, Any], steps: int, allow_code: Sequence[str] = ()) -> Row:
    """The row of a recipe: its model, built and compiled as `seqarch fit` does, on a GPU if there is one.

    Args:
        recipe: the file.
        overrides: what is laid over it, as for `Experiment.from_recipe`.
        steps: steps to time after the first.
        allow_code: packages whose classes the recipe may name.

    Raises:
        UserError: what is wrong in the recipe or the overrides.
    """
    experiment = Experiment.from_recipe(recipe, overrides, allow_code)
    module, data = experiment.model, experiment.data
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    module.configure_model()
    assert module.lm is not None
    lm = module.lm.to(device).train()
    tokens = draw_tokens(lm.vocab_size, data.micro_batch_size or 1, data.sequence_length, device)
    row = time_training(module, module.adamw(), tokens, steps)
    peak = peak_tflops(torch.cuda.get_device_name()) if on_gpu else None
    flops = lm.flops_per_token(data.sequence_length, training=True)
    return {
        "name": Path(recipe).stem,
        "model": ", ".join(dict.fromkeys(type(block.mixer).__name__ for block in lm.blocks)),
        "parameters": lm.n_parameters(),
        "mfu": row["tokens_per_s"] * flops / (peak * 1e12) if peak else None,
        "flops_counted": lm.flops_counted,
        **row,
    }


def main(options: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore")
    try:
        row = time_recipe(**options)
    except UserError as error:
        row = {"error": str(error)}
    print(json.dumps(row))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
