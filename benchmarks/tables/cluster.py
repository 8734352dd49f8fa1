"""What 64 hosts exchange, computed for docs/cluster.md: nothing here was measured.

Every host has 8 H100 GPUs, each with a network card of its own (NVIDIA's guide to the DGX H100). A GPU computes 989
TFLOP/s in bf16. NVLink moves 450 GB/s in each direction, and a card 50 GB/s. A gather or a reduce-scatter over n
processes moves (n - 1) / n of the result to each of them (NVIDIA nccl-tests, doc/PERFORMANCE.md). Between hosts a
result enters each host once, an eighth of it by each card.
"""

from __future__ import annotations

import functools

import torch

from seqarch.mixers.registry import load_mixer
from seqarch.model import SequenceLM
from seqarch.model.feed_forward import GeGLU

HOSTS, GPUS = 64, 8
NVLINK, CARD, PEAK = 450e9, 50e9, 989e12
LENGTH = 2**20
WIDTH, VOCABULARY = 2048, 32_000
BF16, FLOAT32 = 2, 4
MIXERS = {
    "softmax attention": ("Attention", {"n_heads": 16}, 24),
    "exact selection": ("Top1Chunk", {"n_heads": 16, "chunk_size": 128}, 24),
    "Mamba-2": ("Mamba2", {"d_state": 128}, 48),
}
"""The 1.3B recipes: mixer, options and layers. The recurrence has no feed-forward layers."""
Table = list[list[str]]


def sequences_at_64_hosts() -> Table:
    """A step of one sequence of a million tokens for each group of GPUs that shares one."""
    head = ["mixer", "GPUs per sequence", "by NVLink, GB", "by card, GB", "exchange, s", "computation, s", "ratio"]
    rows = [head]
    for name in MIXERS:
        for size in (GPUS, HOSTS * GPUS):
            lm = model(name)
            moved = 2 * len(lm.blocks) * size * bytes_of_a_piece(lm, LENGTH // size)
            halves = 2 * len(lm.blocks) * bytes_of_halves(lm, LENGTH // size)
            computing = lm.flops_per_token(LENGTH, training=True) * LENGTH / size / PEAK
            rows.append([name, *exchange(moved, halves, size, computing)])
    return rows


def parameters_at_64_hosts() -> Table:
    """The parameters and gradients of a step, for both ways of sharding."""
    count = model("softmax attention").n_parameters()
    gathered = (2 * BF16 + FLOAT32) * count  # forward and backward, and gradients
    nvlink, card = links(gathered, HOSTS * GPUS)
    within, _ = links(gathered, GPUS)
    between = 2 * FLOAT32 * count / GPUS * (HOSTS - 1) / HOSTS  # each card sums one eighth of the gradients
    rows = [["strategy", "by NVLink, GB", "by card, GB", "exchange, s"]]
    for name, *moved in (("`fsdp2`", nvlink, card), ("`fsdp2_hybrid`", within, between)):
        rows.append([name, *(f"{each / 1e9:.1f}" for each in moved), f"{seconds(*moved):.3f}"])
    return rows


@functools.cache
def model(name: str) -> SequenceLM:
    """A model of 1.3B parameters, without memory."""
    mixer, options, layers = MIXERS[name]
    with torch.device("meta"):
        mixers = {"mixer": functools.partial(load_mixer(mixer), **options)}
        return SequenceLM(VOCABULARY, WIDTH, layers, mixers, feed_forward=None if mixer == "Mamba2" else GeGLU)


def bytes_of_a_piece(lm: SequenceLM, tokens: int) -> int:
    """What each process of a layer gives to all others: keys and values, or the state after its piece and its decay.

    Convolutions exchange a few tokens more.
    """
    if (shape := getattr(lm.blocks[0].mixer, "state_shape", None)) is not None:
        heads, keys, values = shape
        return FLOAT32 * heads * (keys * values + 1)
    return BF16 * 2 * lm.d_model * tokens


def bytes_of_halves(lm: SequenceLM, tokens: int) -> int:
    """The queries and outputs that each process of a layer of attention exchanges, so that all compute equally much."""
    return 0 if hasattr(lm.blocks[0].mixer, "state_shape") else BF16 * 2 * lm.d_model * tokens


def links(moved: float, size: int) -> tuple[float, float]:
    """Bytes that enter a GPU by NVLink and by its card when `size` processes gather a result of `moved` bytes."""
    hosts = size // GPUS
    return moved * (size - 1) / size, moved * (hosts - 1) / hosts / GPUS


def seconds(nvlink: float, card: float) -> float:
    """Time in which both links move their bytes at once."""
    return max(nvlink / NVLINK, card / CARD)


def exchange(moved: float, halves: float, size: int, computing: float) -> list[str]:
    """The cells of a row of `sequences_at_64_hosts`. On several hosts all `halves` come from others."""
    nvlink, card = links(moved, size)
    bytes_moved = (nvlink, card + halves) if size > GPUS else (nvlink + halves, card)
    time = seconds(*bytes_moved)
    return [
        str(size), *(f"{each / 1e9:.1f}" for each in bytes_moved), f"{time:.3g}", f"{computing:.3g}",
        f"{time / computing:.2g}",
    ]  # fmt: skip
