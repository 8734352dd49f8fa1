"""Time generation by a recipe and by flash-linear-attention's model of the same size, one after the other in one run.

    pip install flash-linear-attention
    python benchmarks/fla_generation.py rwkv7 delta_net --prompt 51200 --new 1024 --batch 16 --csv fla_generation.csv

Both have new weights in bf16. Our step is compiled and replayed from a CUDA graph. The model of fla reads the prompts
in pieces with its own cache, as many tokens in a pass as ours. Its steps run from Python, because its `generate` has no
static cache.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.script import run
from seqarch.arguments import Count, Interval, check_limits
from seqarch.bench.fla_models import COUNTERPARTS, SHARED, build, check_packages
from seqarch.bench.generation import WARM_UP, bench_generation, generation_job, summary, time_steps
from seqarch.bench.jobs import Job, Row
from seqarch.bench.mixers import find_recipes
from seqarch.bench.training_step import mark, seconds_between, start
from seqarch.errors import UserError
from seqarch.model.decoder import PASS, PREFILL


@torch.no_grad()
def time_fla(name: str, prompt: int, new: int, batch_size: int, steps: int) -> Row:
    """The rows of fla's model of a recipe; sizes as for `seqarch.bench.generation.time_generation`."""
    if not torch.cuda.is_available():
        raise UserError("the models of fla need an NVIDIA GPU, and PyTorch sees none here")
    check_packages(name)
    torch.manual_seed(0)
    model: Any = build(name).to("cuda", torch.bfloat16).eval()
    rows = [{"mode": "python", **time_model(model, prompt, new, batch_size, steps)}]
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "rows": rows}


def time_model(model: Any, prompt: int, new: int, batch_size: int, steps: int) -> Row:
    """The row of a model that takes `input_ids`, `past_key_values` and `logits_to_keep`, as those of transformers."""
    device = next(model.parameters()).device
    tokens = torch.randint(SHARED["vocab_size"], (batch_size, prompt), device=device)

    def read(tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        found = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return found.logits[:, -1].float(), found.past_key_values

    def read_prompts() -> tuple[Tensor, Any]:
        logits, cache = torch.empty(0), None
        for piece in tokens.split(max(1, min(PREFILL, PASS // batch_size)), dim=1):
            logits, cache = read(piece, cache)
        return logits, cache

    read_prompts()  # tunes kernels for all shapes of its pieces
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = start(device)
    logits, cache = read_prompts()
    (prefill,) = seconds_between([begin, mark(device)])

    def step() -> None:
        nonlocal logits, cache
        logits, cache = read(torch.multinomial(logits.softmax(-1), 1), cache)

    for _ in range(WARM_UP):
        step()
    seconds = time_steps(step, min(steps, new - WARM_UP), device)
    rate = batch_size * prompt / prefill
    return {"prefill_s": prefill, "prefill_tokens_per_s": rate, **summary(seconds, batch_size, prompt, new, prefill)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipes", nargs="+")
    for option, default in (("prompt", 51200), ("new", 1024), ("batch", 16), ("steps", 48)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    for option in ("prompt", "batch", "steps"):
        check_limits(f"--{option}", getattr(args, option), Count)
    Interval(WARM_UP + 1).check("--new", args.new)
    sizes = {"prompt": args.prompt, "new": args.new, "batch_size": args.batch, "steps": args.steps}
    jobs: list[Job] = []
    for path in find_recipes(args.recipes):
        jobs.append(generation_job(path, ["compiled"], {}, (), **sizes))
        if path.stem in COUNTERPARTS:
            jobs.append(Job(path.stem, "benchmarks.fla_generation:time_fla", {"name": path.stem, **sizes}, "fla"))
    bench_generation(jobs, args.csv)


if __name__ == "__main__":
    run(main)
