"""`seqarch bench generation`: prompts read and tokens drawn by whole models, each in a process of its own.

A Llama of Hugging Face's transformers has its static cache, and the shape of `transformer_pp_110m`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqarch.bench.jobs import Job, Row, Table, report_failures, run_job, shown
from seqarch.bench.training_step import PERCENTS, mark, seconds_between, start, time_steps
from seqarch.errors import UserError, one_line, refused
from seqarch.model import Decoder, SequenceLM, StaticStep, with_bf16_weights

COLUMNS = (
    *("name", "of", "mode", "parameters", "batch_size", "prompt", "new", "prefill_s", "prefill_tokens_per_s"),
    *("step_ms", "p20", "p80", "decode_tokens_per_s", "total_s", "start_up_s", "state_gib", "peak_gib", "error"),
)
MODES: dict[str, dict[str, Any]] = {
    "python": {"capture": False},
    "graph": {"capture": True},
    "compiled": {"capture": True, "compiled": True},
}
"""How steps run: from Python, from a CUDA graph, or compiled from a CUDA graph."""
WARM_UP = 5
"""Steps before the timed steps: kernels are compiled, and the step is captured."""
LLAMA = "llama (transformers)"


def bench_generation(jobs: Sequence[Job], csv: Path | None = None) -> list[Row]:
    """Run each job in a process of its own; print its rows and write them to `csv`.

    Raises:
        UserError: no job ran, with the reason of the first.
        SystemExit: some jobs did not run.
    """
    table = Table(COLUMNS, csv, line)
    for job in jobs:
        done = run_job(job, own_caches=True)
        for row in done.pop("rows", [{}]):
            table.add({**done, **row})
    errors = [row["error"] for row in table.rows if "error" in row]
    report_failures(errors, len(table.rows), "rows were not measured")
    return table.rows


def generation_job(
    recipe: Path | None, modes: Sequence[str], overrides: Mapping[str, Any], allow_code: Sequence[str], **sizes: int
) -> Job:
    """The job that times a recipe or, without one, a Llama of Hugging Face's transformers."""
    if recipe is None:
        return Job(LLAMA, "seqarch.bench.generation:time_llama", sizes, "transformers")
    options = {"recipe": str(recipe), "modes": modes, "overrides": overrides, "allow_code": [*allow_code], **sizes}
    return Job(recipe.stem, "seqarch.bench.generation:time_recipe", options)


def line(row: Row) -> str:
    """A row for the terminal."""
    name = f"{row['name']:28s} {row.get('mode', ''):9s}"
    if "error" in row:
        return f"{name} not measured: {one_line(row['error'])}"
    return shown(
        {**row, "head": name},
        "{head} batch {batch_size:3d}",
        "prefill {prefill_tokens_per_s:10,.0f} tokens/s",
        "step {step_ms:8.3f} ms  [{p20:.3f}, {p80:.3f}]  {decode_tokens_per_s:9,.0f} tokens/s  total {total_s:.1f} s",
        "state {state_gib:.1f} GiB, peak {peak_gib:.1f} GiB",
        "start {start_up_s:.0f} s",
    )


def time_recipe(
    recipe: str, modes: Sequence[str], overrides: dict[str, Any], allow_code: Sequence[str], **sizes: int
) -> Row:
    """The rows of a recipe as `rows`, one for each mode: new weights, random tokens, the precision of training.

    Args:
        recipe: the file.
        modes: names of `MODES`.
        overrides: what is laid over the recipe, as for `Experiment.from_recipe`.
        allow_code: packages whose classes the recipe may name.
        **sizes: as for `time_generation`.

    Raises:
        UserError: what is wrong in the recipe or the overrides, or not even one sequence fits in memory.
    """
    lm, parameters = new_model(recipe, overrides, allow_code)
    rows = [{"parameters": parameters, "mode": mode, **guarded(time_generation, lm, mode, **sizes)} for mode in modes]
    return {"rows": rows}


def new_model(
    recipe: str | Path, overrides: Mapping[str, Any] | None = None, allow_code: Sequence[str] = ()
) -> tuple[SequenceLM, int]:
    """A recipe's model with new weights, as it generates, and its parameters, where tied weights count once.

    It is on a GPU if there is one, then with linear layers in bf16.
    """
    from seqarch.experiment.experiment import Experiment

    module = Experiment.from_recipe(recipe, overrides, allow_code).model
    module.prepare_inference()
    module.configure_model()
    lm, parameters = module.built().eval(), module.built().n_parameters()
    return with_bf16_weights(lm.to("cuda")) if torch.cuda.is_available() else lm, parameters


def guarded(call: Callable[..., Row], *args: Any, **options: Any) -> Row:
    """Return the row, or a row with the error, so that the other modes still run."""
    try:
        return call(*args, **options)
    except Exception as error:  # whatever a compiler raises
        return {"error": " ".join(str(error).split())[:300]}


def time_generation(lm: SequenceLM, mode: str, prompt: int, new: int, batch_size: int, steps: int) -> Row:
    """Time a model in one mode.

    Args:
        lm: from `new_model`.
        mode: a name of `MODES`; those of CUDA graphs need a GPU.
        prompt: tokens of a prompt.
        new: tokens to draw for each.
        batch_size: prompts, or as many as fit.
        steps: steps to time, in the middle of the new tokens.
    """
    device = lm.embedding.weight.device
    on_gpu = device.type == "cuda"
    if MODES[mode]["capture"] and not on_gpu:
        raise UserError(f"--modes {mode} replays a CUDA graph, which needs a GPU: on a CPU use --modes python")
    decoder = Decoder(lm, temperature=1.0, **MODES[mode])
    if not (batch_size := decoder.largest_batch(batch_size, prompt + new)):
        decoder.check_memory(1, prompt + new)
    tokens = torch.full((batch_size, prompt + new), -1, device=device)
    tokens[:, :prompt] = torch.randint(lm.vocab_size, (batch_size, prompt), device=device)
    decoder.prefill(tokens[:, : prompt - 1], prompt + new)  # compiles kernels for all shapes of its pieces
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = start(device)
    state = decoder.prefill(tokens[:, : prompt - 1], prompt + new)
    (prefill,) = seconds_between([begin, mark(device)])
    step = StaticStep(decoder, state, tokens, prompt - 1)
    middle = max(0, (new - steps - WARM_UP) // 2)
    step.clock.position += middle  # a step's time does not depend on the caches
    step.clock.lengths += middle
    tokens[:, : prompt + middle].clamp_(min=0)
    start_up = sum(time_steps(step, WARM_UP, device))
    if MODES[mode]["capture"] and step.graph is None:
        raise RuntimeError("the step could not be captured")
    seconds = time_steps(step, min(steps, new - WARM_UP - middle), device)
    states = {tensor.data_ptr(): tensor.nbytes for tensor in state.tensors()}
    return {
        "prefill_s": prefill,
        "prefill_tokens_per_s": batch_size * (prompt - 1) / prefill,
        "start_up_s": start_up,
        "state_gib": sum(states.values()) / 2**30,
        **summary(seconds, batch_size, prompt, new, prefill),
    }


def summary(seconds: list[float], batch_size: int, prompt: int, new: int, prefill: float) -> Row:
    """The columns of a row for the times of steps; `total_s` is the time to read prompts and draw tokens."""
    p20, p50, p80 = np.percentile(seconds, PERCENTS).tolist()
    return {
        "batch_size": batch_size,
        "prompt": prompt,
        "new": new,
        "step_ms": 1000 * p50,
        "p20": 1000 * p20,
        "p80": 1000 * p80,
        "decode_tokens_per_s": batch_size / p50,
        "total_s": prefill + new * sum(seconds) / len(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    }


SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 2048,
    "tie_word_embeddings": True,
    "attn_implementation": "sdpa",
}


@torch.no_grad()
def time_llama(prompt: int, new: int, batch_size: int, steps: int) -> Row:
    """The `rows` of steps from Python and compiled with CUDA graphs, with a static cache as in `generate`.

    The prompt is read in one pass without a cache, which needs no mask. A step's time does not depend on what the
    cache holds, so the cache is not filled.

    Raises:
        UserError: transformers or a GPU is missing.
    """
    model, cache = llama(batch_size, prompt + new)
    tokens = torch.randint(SHAPE["vocab_size"], (batch_size, prompt), device="cuda")
    model(tokens[:, :2048], use_cache=False, logits_to_keep=1)

    def read() -> None:
        for row in tokens.split(1):
            model(row, use_cache=False, logits_to_keep=1)

    (prefill,) = time_steps(read, 1, tokens.device)
    shared = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "prefill_s": prefill,
        "prefill_tokens_per_s": batch_size * prompt / prefill,
        "state_gib": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / 2**30,
    }

    def timed(mode: str) -> Row:
        for layer in cache.layers:
            layer.cumulative_length.fill_(prompt + new // 2 - steps // 2 - WARM_UP)
        forward = model if mode == "python" else torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        start_up, seconds = draw(forward, cache, tokens[:, :1].clone(), min(steps, new - WARM_UP))
        return {"start_up_s": start_up, **summary(seconds, batch_size, prompt, new, prefill)}

    return {"rows": [{**shared, "mode": mode, **guarded(timed, mode)} for mode in ("python", "compiled")]}


def llama(batch_size: int, length: int) -> tuple[Any, Any]:
    """The model in bf16 on the GPU, and its empty cache for `length` tokens."""
    with refused("--against llama needs transformers: pip install transformers", ImportError):
        from transformers import LlamaConfig, LlamaForCausalLM, StaticCache  # pyright: ignore[reportMissingImports]
    if not torch.cuda.is_available():
        raise UserError("--against llama needs an NVIDIA GPU, and PyTorch sees none here")
    device = torch.device("cuda")
    config = LlamaConfig(max_position_embeddings=length, **SHAPE)
    model: Any = LlamaForCausalLM(config)
    cache: Any = StaticCache(config=config, max_cache_len=length)
    head_dim = config.hidden_size // config.num_attention_heads
    cache.early_initialization(batch_size, config.num_key_value_heads, head_dim, torch.bfloat16, device)
    return model.to(device, torch.bfloat16).eval(), cache


def draw(forward: Callable[..., Any], cache: Any, one: Tensor, steps: int) -> tuple[float, list[float]]:
    """Return the seconds of the warm-up and of each of the next `steps` steps, which continue `one` `[B, 1]`."""

    def step() -> None:
        logits = forward(one, past_key_values=cache, use_cache=True).logits[:, -1].float()
        one.copy_(torch.multinomial(logits.softmax(-1), 1))

    return sum(time_steps(step, WARM_UP, one.device)), time_steps(step, steps, one.device)
