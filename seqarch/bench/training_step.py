"""One training step, timed: forward, backward, clipping and the optimizer, as `seqarch fit` runs them."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from seqarch.bench.jobs import Row
from seqarch.data.packing import as_documents

Precision = Literal["bf16-mixed", "bf16-true", "32-true"]

PERCENTS = (20, 50, 80)
"""The percentiles of a row."""
CLIP = 1.0
"""Norm that gradients are clipped to, as by default in `seqarch fit`."""


def draw_tokens(vocab_size: int, micro_batch_size: int, sequence_length: int, device: torch.device) -> Tensor:
    """Random tokens `[B, T + 1]` as unequally frequent as words (Zipf), so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    frequency = 1.0 / torch.arange(10, vocab_size + 10)
    size = micro_batch_size * (sequence_length + 1)
    tokens = torch.multinomial(frequency, size, replacement=True, generator=generator)
    return tokens.view(micro_batch_size, sequence_length + 1).to(device)


def time_training(
    loss_of: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    steps: int,
    precision: Precision | None = None,
) -> Row:
    """Train on one batch over and over: the first step, then `steps` more that are timed each.

    Args:
        loss_of: the loss of tokens `[B, T + 1]`.
        optimizer: of the model's weights.
        tokens: the batch.
        steps: steps to time.
        precision: "bf16-mixed" is bf16 autocast, the others run in the dtype of the weights; by default "bf16-mixed"
            on a GPU and "32-true" on a CPU.

    Returns:
        Seconds of the first step, tokens per second (median, 20th and 80th percentile), the peak of memory that tensors
        held after the first step, first and last loss in nats per token.
    """
    device = tokens.device
    on_gpu = device.type == "cuda"
    chosen = precision or ("bf16-mixed" if on_gpu else "32-true")
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(train_step(loss_of, optimizer, tokens, chosen))

    (start_up,) = time_steps(step, 1, device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = time_steps(step, steps, device)
    p20, p50, p80 = np.percentile(tokens[:, 1:].numel() / np.array(seconds), PERCENTS).tolist()
    return {
        "precision": chosen,
        "micro_batch_size": tokens.shape[0],
        "sequence_length": tokens.shape[1] - 1,
        "steps": steps,
        "start_up_s": start_up,
        "tokens_per_s": p50,
        "p20": p20,
        "p80": p80,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None,
        "loss_first": losses[0].item(),
        "loss_last": losses[-1].item(),
    }


def train_step(
    loss_of: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, tokens: Tensor, precision: Precision
) -> Tensor:
    """One step on a batch; its loss."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
        loss = loss_of(tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def mark(device: torch.device) -> Any:
    """A point in time. On a GPU it is an event in the queue, so that nothing waits for the host."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def start(device: torch.device) -> Any:
    """A mark after all work that the device was given before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return mark(device)


def seconds_between(marks: Sequence[Any]) -> list[float]:
    """The times from each mark to the next."""
    pairs = list(itertools.pairwise(marks))
    if isinstance(marks[0], float):
        return [after - before for before, after in pairs]
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in pairs]


def time_steps(step: Callable[[], Any], steps: int, device: torch.device) -> list[float]:
    """Seconds of each of `steps` calls."""
    marks = [start(device)]
    for _ in range(max(1, steps)):
        step()
        marks.append(mark(device))
    return seconds_between(marks)


def draw_documents(tokens: Tensor, documents: int, batches: int = 3) -> list[dict[str, Tensor]]:
    """Batches of documents with `documents` tokens on average, which begin at random; they differ only in the borders.

    All have room for as many documents, as those of a loader.
    """
    generator = torch.Generator().manual_seed(1)
    begins = torch.rand(batches, *tokens.shape, generator=generator) < 1 / documents
    begins[:, :, 0] = True
    count = 1 << int(begins[:, :, :-1].sum((1, 2)).max()).bit_length()
    made = [as_documents(tokens.cpu(), each.cumsum(1).int(), count) for each in begins]
    return [{"tokens": tokens, **{name: each.to(tokens.device) for name, each in batch.items()}} for batch in made]


def flops_of(lm: Any, batch: dict[str, Tensor], length: int) -> float:
    """Operations per token of a training step, in which no token attends beyond its document."""
    sizes = batch["cu_seqlens"].diff().tolist() if "cu_seqlens" in batch else [length]
    counts = Counter(size for size in sizes if size)
    tokens = sum(size * n for size, n in counts.items())
    return sum(size * n * lm.flops_per_token(size, training=True) for size, n in counts.items()) / tokens


def time_recipe(
    recipe: str, overrides: dict[str, Any], steps: int, allow_code: Sequence[str] = (), documents: int | None = None
) -> Row:
    """The row of a recipe: its model, built and compiled as `seqarch fit` does, on a GPU if there is one.

    Args:
        recipe: the file.
        overrides: what is laid over it, as for `Experiment.from_recipe`.
        steps: steps to time after the first.
        allow_code: packages whose classes the recipe may name.
        documents: mean tokens of documents, for steps with a document mask.

    Raises:
        UserError: what is wrong in the recipe or the overrides, or a mixer that cannot read documents.
    """
    from seqarch.experiment.experiment import Experiment
    from seqarch.training.callbacks.throughput import peak_tflops
    from seqarch.training.checks import check_capability

    experiment = Experiment.from_recipe(recipe, overrides, allow_code)
    module, data = experiment.model, experiment.data
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    module.configure_model()
    lm = module.built().to(device).train()
    tokens = draw_tokens(lm.vocab_size, data.batch_size(world_size=1), data.sequence_length, device)
    batches = [{"tokens": tokens}]
    if documents:
        check_capability(lm, "packed", "--documents")
        batches = draw_documents(tokens, documents)
    ring = itertools.cycle(batches)
    row = time_training(lambda _: module.loss(next(ring)), module.new_optimizer(), tokens, steps)
    peak = peak_tflops(torch.cuda.get_device_name()) if on_gpu else None
    flops = flops_of(lm, batches[0], data.sequence_length)
    return {
        "name": Path(recipe).stem,
        "model": ", ".join(dict.fromkeys(type(block.mixer).__name__ for block in lm.blocks if block.mixer)),
        "parameters": lm.n_parameters(),
        "mfu": row["tokens_per_s"] * flops / (peak * 1e12) if peak else None,
        "flops_counted": lm.flops_counted,
        "documents": documents,
        **row,
    }
