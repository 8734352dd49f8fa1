"""Times a Llama of Hugging Face's transformers with its static cache, in the shape of `transformer_pp_110m`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqarch.bench.generation import WARM_UP, guarded, summary
from seqarch.bench.jobs import Row
from seqarch.bench.training_step import time_steps
from seqarch.errors import UserError, refused

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
