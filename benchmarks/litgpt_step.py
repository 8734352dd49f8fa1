"""Time a training step of Transformer++ next to litgpt's model of the same shape, one after the other in one run.

    pip install litgpt
    python benchmarks/litgpt_step.py transformer_pp_1b transformer_pp_110m --csv litgpt.csv

Both train in bf16-mixed on one GPU with fused AdamW and the recipe's micro-batch. The model of litgpt is compiled as a
whole. Its loss is `chunked_cross_entropy` with `chunk_size=0`, as in its own `pretrain`. Its output layer is not tied
to the embedding, so it has more parameters.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqarch.bench.jobs import Job, answer
from seqarch.bench.mixers import bench_mixers, find_recipes
from seqarch.bench.rows import Row
from seqarch.bench.training_step import draw_tokens, time_training
from seqarch.experiment.experiment import Experiment

RATES = {"lr": 2e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def shape_of(recipe: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """litgpt's options for the shape of a Transformer++ recipe, and the batch `[micro_batch_size, sequence_length]`."""
    experiment = Experiment.from_recipe(recipe, overrides or {})
    module, data = experiment.model, experiment.data
    with torch.device("meta"):
        module.configure_model()
    lm = module.lm
    assert lm is not None
    block: Any = lm.blocks[0]
    config = {
        "block_size": data.sequence_length,
        "padded_vocab_size": lm.vocab_size,
        "n_layer": len(lm.blocks),
        "n_head": block.mixer.n_heads,
        "n_embd": lm.embedding.weight.shape[1],
        "intermediate_size": block.feed_forward.down.in_features,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
    }
    return {"config": config, "batch": [data.micro_batch_size or 1, data.sequence_length]}


def time_litgpt(name: str, config: Mapping[str, Any], batch: Sequence[int], steps: int) -> Row:
    """The row of litgpt's model, with `seqarch bench mixers`' step around it."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = GPT(Config(name="litgpt", **config))
    forward = torch.compile(model) if device.type == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), **RATES, fused=True)

    def loss_of(tokens: Tensor) -> Tensor:
        return chunked_cross_entropy(forward(tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous(), chunk_size=0)

    tokens = draw_tokens(config["padded_vocab_size"], batch[0], batch[1], device)
    row = time_training(loss_of, optimizer, tokens, steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"name": name, "model": "litgpt GPT", "parameters": parameters, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="times that the list is run")
    parser.add_argument("--own_caches", action="store_true", help="use compile caches of earlier runs")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    jobs: list[Job] = []
    for path in map(str, find_recipes(args.recipes) * args.rounds):
        name, steps = Path(path).stem, {"steps": args.steps}
        jobs.append(Job(name, "seqarch.bench.training_step", {"recipe": path, "overrides": {}, **steps}))
        jobs.append(Job(name, "benchmarks.litgpt_step", {"name": name, **shape_of(path), **steps}, "litgpt"))
    bench_mixers(jobs, args.csv, own_caches=args.own_caches)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        answer(time_litgpt)
    else:
        main()
