"""Time a training step of Transformer++ next to published models of the same shape, one after the other in one run.

    pip install litgpt==0.5.13 torchtitan==0.2.2
    python -m benchmarks.published_step transformer_pp_110m transformer_pp_1b --csv published.csv

All train in bf16-mixed on one GPU with fused AdamW and the recipe's micro-batch. The output layers of litgpt's GPT
and torchtitan's Llama are not tied to the embedding, so these models have more parameters. litgpt's model is compiled
as a whole. Its loss is that of its own `pretrain`: `chunked_cross_entropy` with a `chunk_size` of zero. torchtitan's
model is compiled block by block, with its own compiled loss.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.script import run
from seqarch.bench.jobs import Job, Row
from seqarch.bench.mixers import bench_mixers, find_recipes
from seqarch.bench.training_step import draw_tokens, time_training
from seqarch.errors import UserError
from seqarch.experiment.experiment import Experiment

RATES = {"lr": 2e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
LossOf = Callable[[Tensor, Tensor], Tensor]
"""Takes inputs and targets, `[batch, time]` each."""


def shape_of(recipe: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The sizes of a Transformer++ recipe's model, and its batch `[micro_batch_size, sequence_length]`."""
    experiment = Experiment.from_recipe(recipe, overrides or {})
    module, data = experiment.model, experiment.data
    with torch.device("meta"):
        module.configure_model()
    lm = module.lm
    assert lm is not None
    block: Any = lm.blocks[0]
    return {
        "batch": [data.batch_size(world_size=1), data.sequence_length],
        "vocab_size": lm.vocab_size,
        "layers": len(lm.blocks),
        "heads": block.mixer.n_heads,
        "width": lm.embedding.weight.shape[1],
        "hidden": block.feed_forward.down.in_features,
    }


def compiled(part: Any, **options: Any) -> Any:
    """The part, compiled if there is a GPU."""
    return torch.compile(part, **options) if torch.cuda.is_available() else part


def litgpt(vocab_size: int, layers: int, heads: int, width: int, hidden: int, length: int) -> tuple[nn.Module, LossOf]:
    """The GPT of litgpt with its compiled loss."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    model = GPT(
        Config(
            name="litgpt",
            block_size=length,
            padded_vocab_size=vocab_size,
            n_layer=layers,
            n_head=heads,
            n_embd=width,
            intermediate_size=hidden,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
        )
    )
    forward = compiled(model)
    return model, lambda inputs, targets: chunked_cross_entropy(forward(inputs), targets, chunk_size=0)


def torchtitan(
    vocab_size: int, layers: int, heads: int, width: int, hidden: int, length: int
) -> tuple[nn.Module, LossOf]:
    """The Llama 3 of torchtitan with its compiled loss."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    model: Any = Transformer(
        TransformerModelArgs(
            dim=width,
            n_layers=layers,
            n_heads=heads,
            vocab_size=vocab_size,
            multiple_of=hidden & -hidden,  # its hidden size is 8 / 3 of the width, rounded up to a multiple of this
            max_seq_len=length,
        )
    )
    with torch.no_grad():
        model.init_weights()
    found = model.layers["0"].feed_forward.w1.out_features
    if found != hidden:
        raise UserError(f"torchtitan's Llama of width {width} has {found} hidden units, not {hidden}")
    for name, block in model.layers.named_children():
        model.layers.register_module(name, compiled(block, fullgraph=True))
    loss = compiled(cross_entropy_loss)
    return model, lambda inputs, targets: loss(model(inputs), targets) / targets.numel()


MODELS = {"litgpt": litgpt, "torchtitan": torchtitan}


def time_published(name: str, of: str, batch: Sequence[int], steps: int, **sizes: int) -> Row:
    """The row of a published model, with the step of `seqarch bench mixers` around it."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model, loss = MODELS[of](**sizes, length=batch[1])
    optimizer = torch.optim.AdamW(model.parameters(), **RATES, fused=True)

    def loss_of(tokens: Tensor) -> Tensor:
        return loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    row = time_training(loss_of, optimizer, draw_tokens(sizes["vocab_size"], batch[0], batch[1], device), steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"name": name, "model": f"{of} {type(model).__name__}", "parameters": parameters, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--of", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="times that the list is run")
    parser.add_argument("--own_caches", action="store_true", help="use compile caches of earlier runs")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    jobs: list[Job] = []
    for path in map(str, find_recipes(args.recipes) * args.rounds):
        name, steps = Path(path).stem, {"steps": args.steps}
        jobs.append(Job(name, "seqarch.bench.training_step:time_recipe", {"recipe": path, "overrides": {}, **steps}))
        options = {"name": name, **shape_of(path), **steps}
        jobs += [Job(name, "benchmarks.published_step:time_published", {"of": of, **options}, of) for of in args.of]
    bench_mixers(jobs, args.csv, own_caches=args.own_caches)


if __name__ == "__main__":
    run(main)
