"""Whether each mixer trains under torch.compile(dynamic=True) on sequences of several lengths, and what it costs.

    python benchmarks/dynamic_shapes.py --csv dynamic.csv
    python benchmarks/dynamic_shapes.py Mamba2 RWKV7 --size tiny --lengths 40 33

A model of one layer (or one repetition of its pattern) runs forward and backward at each length: in bf16 on a GPU, in
float32 elsewhere. `error` is the largest relative difference from the same model without compilation: the loss of each
token and the gradient of the embedding. Top-1 mixers may differ, because other roundings select other chunks or
elements for a few queries. `noise` is the same difference, at the first length, between the model and itself with
weights moved by up to half a step of bf16. `graphs` are compiled at the first length, `recompiled` at the others.
`first_s` is the first call, `new_s` the longest first call at another length, `again_s` the median of second calls.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from seqarch.exam.models import find_model, load_size
from seqarch.experiment.experiment import Experiment
from seqarch.mixers.registry import import_mixers
from seqarch.model import SequenceLM
from seqarch.tables import write_csv

COLUMNS = ("mixer", "result", "error", "noise", "graphs", "recompiled", "graph_breaks", "first_s", "new_s", "again_s")
VOCABULARY = 257
TOLERANCE = 5e-2
WORDS = {"RWKV7Shell": "rwkv7_shell_softmax_100k"}
"""Recipes of mixers that cannot be built without options."""


def build(mixer: str, size: str, device: str) -> SequenceLM:
    """The model of a mixer at the shapes of a size."""
    options = {"trainer.accelerator": "cpu", "trainer.precision": "32-true", "model.n_layers": "1"}
    recipe = find_model(load_size(size, options), WORDS.get(mixer, mixer), {})[1]
    recipe["model"] |= {"vocab_size": VOCABULARY, "compile": False}
    torch.manual_seed(0)
    lm = Experiment.from_recipe(recipe).model.build()
    for weight in lm.parameters():
        if weight.dim() > 1 and not weight.any():  # as in RWKV, whose blocks would add nothing
            torch.nn.init.normal_(weight, std=0.02)
    return lm.to(device)


def run(lm: SequenceLM, tokens: Tensor) -> tuple[float, list[Tensor]]:
    """Seconds of a pass, forward and backward; the losses `[B, T]` and the gradient of the embedding."""
    on_gpu = tokens.is_cuda
    start = time.perf_counter()
    with torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext():
        losses = lm(tokens[:, :-1], tokens[:, 1:], reduction="none")
    gradient = torch.autograd.grad(losses.mean(), lm.embedding.weight)[0]
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start, [losses.detach(), gradient]


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))


@torch.no_grad()
def moved(lm: SequenceLM) -> SequenceLM:
    """A copy with noise on the weights."""
    lm, generator = copy.deepcopy(lm), torch.Generator().manual_seed(1)
    for weight in lm.parameters():
        weight.mul_(1 + 2**-9 * (2 * torch.rand(weight.shape, generator=generator) - 1).to(weight.device))
    return lm


def measure(mixer: str, size: str, lengths: Sequence[int], device: str, compiler: dict[str, Any]) -> dict[str, Any]:
    """The row of a mixer."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(VOCABULARY, (2, n + 1), generator=generator).to(device) for n in lengths]
    lm = build(mixer, size, device)
    wanted = [run(lm, tokens)[1] for tokens in batches]
    noise = error(run(moved(lm), batches[0])[1], wanted[0])
    torch.compiler.reset()
    counters.clear()
    for block in lm.blocks:
        block.compile(**compiler)
    first, again, errors, graphs = [], [], [], []
    for tokens, expected in zip(batches, wanted, strict=True):
        seconds, found = run(lm, tokens)
        first.append(seconds)
        again.append(run(lm, tokens)[0])
        errors.append(error(found, expected))
        graphs.append(counters["stats"]["unique_graphs"])
    return {
        "result": "works" if max(errors) < TOLERANCE else "differs",
        "error": max(errors),
        "noise": noise,
        "graphs": graphs[0],
        "recompiled": graphs[-1] - graphs[0],
        "graph_breaks": sum(counters["graph_break"].values()),
        "first_s": first[0],
        "new_s": max(first[1:], default=0.0),
        "again_s": statistics.median(again),
    }


def rows(mixers: Sequence[str], limit: float, *args: Any) -> Iterator[dict[str, Any]]:
    """The row of each mixer; after `limit` seconds no other mixer begins."""
    end = time.monotonic() + limit
    for mixer in mixers:
        row: dict[str, Any] = {"mixer": mixer, "result": "no time left"}
        if time.monotonic() < end:
            try:
                row |= measure(mixer, *args)
            except Exception as failure:  # a compiler may raise anything; what it says is the result
                row["result"] = f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0]}"
        yield row


def text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixers", nargs="*", help="names as in `seqarch mixers`; all by default")
    parser.add_argument("--size", default="draft", help="of the exam, see `seqarch exam --help`")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 640, 1000, 1537])
    parser.add_argument("--default", action="store_true", help="compile as `model.compile` does, without dynamic=True")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which no other mixer begins")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args(arguments)
    found = []
    compiler = {"dynamic": None if args.default else True, "backend": args.backend}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for row in rows(args.mixers or sorted(import_mixers()), args.limit, args.size, args.lengths, device, compiler):
        print("  ".join(f"{name} {text(value)}" for name, value in row.items()), flush=True)
        found.append([row.get(name) for name in COLUMNS])
        if args.csv:
            write_csv(args.csv, COLUMNS, found)


if __name__ == "__main__":
    main()
