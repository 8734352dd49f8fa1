"""Training steps of models that read each sequence on several GPUs, of which each has a piece.

    torchrun --nproc_per_node 4 -m benchmarks.context_steps equal --csv equal.csv
    torchrun --nproc_per_node 4 -m benchmarks.context_steps time --length 409600 --csv four.csv rwkv7_100k mamba2_100k
    python -m benchmarks.context_steps time --length 409600 --csv one.csv rwkv7_100k mamba2_100k

`equal` trains each mixer for a few steps on one GPU and on all of them, and prints how far losses and gradients differ.
The gradients are summed as FSDP2 sums them, without FSDP2. `time` times the steps of recipes as FSDP2 runs them.
"""

import argparse
import datetime
import functools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.script import run
from seqarch.bench.jobs import Row, Table
from seqarch.bench.training_step import CLIP, draw_tokens, time_training
from seqarch.data.packing import as_documents
from seqarch.errors import UserError, of_memory
from seqarch.experiment.experiment import Experiment
from seqarch.mixers.pieces import GROUPS, Piece
from seqarch.training import LanguageModel
from seqarch.training.fsdp import CONTEXT, shard

CASES = {
    "softmax": "rwkv7_shell_softmax_100k",
    "window": "rwkv7_shell_window_256_100k",
    "exact": "rwkv7_shell_top1_chunk_100k",
    "approximate": "rwkv7_shell_top1_chunk_approx_100k",
    "Mamba-2": "mamba2_100k",
    "RWKV-7": "rwkv7_100k",
    "DeltaNet": "delta_net_110m",
    "Gated DeltaNet": "gated_delta_net_110m",
}
RATE = 1e-3
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
MOST = 8192
"""Tokens of the sequences that are compared; an eighth of them in float64, without kernels."""
PATIENCE = datetime.timedelta(minutes=3)
"""How long a process waits for the others, which may compile, before it ends with the name of the exchange."""
MEAN_DOCUMENT = 500
"""Tokens."""


def begin() -> tuple[int, int]:
    """Rank and number of the processes, which torchrun started, or one."""
    if "RANK" not in os.environ:
        return 0, 1
    if isinstance(DEVICE, torch.device):
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if isinstance(DEVICE, torch.device) else "gloo", timeout=PATIENCE)
    return dist.get_rank(), dist.get_world_size()


@functools.cache
def mesh_of(world: int, context: int) -> DeviceMesh:
    """The processes that share sequences. Each mesh keeps memory of every GPU for its exchanges."""
    shape, names = (world // context, context), ("data", "context")
    return init_device_mesh(torch.device(DEVICE).type, shape, mesh_dim_names=names)["context"]


def piece_of(world: int, context: int, length: int) -> Piece:
    """This process's piece of sequences that `context` processes share, as the strategy FSDP2 makes it."""
    mesh = mesh_of(world, context)
    GROUPS[CONTEXT] = mesh.get_group()
    return Piece(mesh.get_local_rank(), context, length // context, CONTEXT)


def build(recipe: str, overrides: Mapping[str, Any]) -> LanguageModel:
    """The module of a recipe with new weights, not compiled, the same in each process."""
    torch.manual_seed(0)
    module = Experiment.from_recipe(recipe, overrides).model
    module.compile_blocks = False
    with torch.device(DEVICE):
        module.configure_model()
    return module


def train(module: LanguageModel, batch: Mapping[str, Tensor], steps: int, half: bool, processes: int = 1) -> Tensor:
    """Loss and gradient norm of each step, `[steps, 2]` float64, of batches whose means `processes` share."""
    parameters = [*module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    found = []
    for _ in range(steps):
        with torch.autocast(torch.device(DEVICE).type, torch.bfloat16, enabled=half):
            loss = module.loss({**batch})
        loss.backward()
        loss = loss.detach()
        for each in (loss, *(p.grad for p in parameters if p.grad is not None)) if processes > 1 else ():
            dist.all_reduce(each)
            each /= processes
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.stack((loss.double(), norm.double())))
    return torch.stack(found).cpu()


def compare(case: str, world: int, context: int, length: int, half: bool, documents: bool, overrides: Any) -> Row:
    """How far steps of all processes together are from those of one process."""
    begun = time.perf_counter()
    module = build(CASES[case], overrides)
    vocab_size = module.built().vocab_size
    generator = torch.Generator(DEVICE).manual_seed(1)
    with torch.no_grad():  # no output starts at zero, so all parameters have gradients
        for parameter in module.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, device=DEVICE, generator=generator)
    module.train() if half else module.double()
    weights = {name: each.clone() for name, each in module.state_dict().items()}
    tokens = draw_tokens(vocab_size, world // context, length, torch.device(DEVICE))
    borders: dict[str, Tensor] = {}
    if documents:
        begins = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) < 1 / MEAN_DOCUMENT
        begins[:, 0] = True
        borders = {name: each.to(DEVICE) for name, each in as_documents(tokens.cpu(), begins.cumsum(1).int()).items()}
    alone = train(module, {"tokens": tokens, **borders}, 3, half)
    module.load_state_dict(weights)
    module.piece = piece_of(world, context, length)
    own = tokens[dist.get_rank() // context][None]
    shared = train(module, {"tokens": own, **borders}, 3, half, world)
    loss, norm = ((shared - alone) / alone).abs().amax(0).tolist()
    return {
        **{"case": case, "gpus": world, "context": context, "length": length, "documents": documents},
        **{"precision": "bf16-mixed" if half else "64-true", "loss_differs": loss, "norm_differs": norm},
        **{"loss_alone": alone[-1, 0].item(), "loss_shared": shared[-1, 0].item()},
        "seconds": time.perf_counter() - begun,
    }


def time_recipe(
    recipe: str, world: int, context: int, length: int | None, steps: int, compiled: bool, overrides: Mapping[str, Any]
) -> Row:
    """The row of a recipe, with one sequence of `length` tokens for each `context` processes, or with its own batch."""
    experiment = Experiment.from_recipe(recipe, overrides)
    batch = (1, length) if length else (experiment.data.batch_size(world_size=1), experiment.data.sequence_length)
    module = build(recipe, overrides)
    lm = module.built().train()
    if world > 1:
        mesh = init_device_mesh(torch.device(DEVICE).type, (world,), mesh_dim_names=("data_parallel",))
        shard(lm, mesh, torch.bfloat16 if isinstance(DEVICE, torch.device) else None)  # a CPU trains in float32
    if context > 1:
        module.piece = piece_of(world, context, batch[1])
    if compiled:
        lm.compile_parts()
    tokens = draw_tokens(lm.vocab_size, *batch, torch.device(DEVICE))
    row = time_training(lambda each: module.loss({"tokens": each}), module.new_optimizer(), tokens, steps)
    for name in ("loss_first", "loss_last") if world > 1 else ():
        loss = torch.tensor(row[name], device=DEVICE, dtype=torch.float64)
        dist.all_reduce(loss)
        row[name] = loss.item() / world
    for name in ("tokens_per_s", "p20", "p80"):
        row[name] *= world // context
    return {"recipe": recipe, "gpus": world, "context": context, "compiled": compiled, **row}


def equal(args: argparse.Namespace, table: Table, rank: int, world: int) -> None:
    ways = [(False, False), (True, False), (True, True)]
    for case in args.names or CASES:
        for half, documents in ways:
            for context in (world,) if documents or world < 4 else (world, world // 2):
                length = min(args.length or MOST, MOST if half else MOST // 8)
                overrides = {"model.n_layers": 2, "model.vocab_size": 512, **args.overrides}
                row = compare(case, world, context, length, half, documents, overrides)
                if rank == 0:
                    table.add(row)


def timed(args: argparse.Namespace, table: Table, rank: int, world: int) -> None:
    context = args.context or world
    for recipe in args.names:
        try:
            row = time_recipe(recipe, world, context, args.length, args.steps, args.compile, args.overrides)
        except torch.OutOfMemoryError as error:
            if world > 1:  # the other processes wait for this one
                raise
            row = {"recipe": recipe, "gpus": world, "context": context, "error": of_memory(error)}
        torch.compiler.reset()
        if rank == 0:
            table.add(row)


def line(row: Row) -> str:
    return ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
    )


def pairs(words: Sequence[str]) -> dict[str, Any]:
    """Overrides such as `model.n_layers=2`."""
    import yaml

    return {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("equal", "time"))
    parser.add_argument("names", nargs="*", help="cases or recipes")
    parser.add_argument("--length", type=int, help="tokens of a sequence; its recipe's unless given")
    parser.add_argument("--context", type=int, help="processes that share a sequence; all unless given")
    parser.add_argument("--steps", type=int, default=3, help="steps to time after the first")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--set", action="append", default=[], help="an override, such as model.n_layers=2")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    args.overrides = pairs(args.set)
    if unknown := [name for name in args.names if args.what == "equal" and name not in CASES]:
        raise UserError(f"no such case: {unknown[0]}; there are {', '.join(CASES)}")
    rank, world = begin()
    table = Table((), args.csv if rank == 0 else None, line if rank == 0 else None)
    {"equal": equal, "time": timed}[args.what](args, table, rank, world)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
