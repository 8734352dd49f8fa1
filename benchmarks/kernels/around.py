"""Times what surrounds a recurrence, short convolutions and Mamba-2's gated norm, next to other kernels.

In the rows, H is the number of channels. D is the number of tokens that an output sees or, for the norm, the size
of a head.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqarch.bench.jobs import Row
from seqarch.bench.timing import passes
from seqarch.kernels import gated_rms_norm, qkv_convolution, short_convolution
from tests.kernels import inputs

WIDTH, HEADS, KEYS, HEAD = 4, 8, 96, 64
DEVICE = "cuda"

Op = Callable[..., Any]


def tensors_of(name: str, B: int, T: int, C: int) -> list[Tensor]:
    """Arguments of an op of `OURS` with C channels: bf16 activations, float32 weights."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE, "seed": None}
    if name == "gated norm":
        return list(inputs.gated_norm(B, T, C // HEAD, HEAD, **options).values())
    return list(inputs.short_convolution(B, T, C, WIDTH, **options).values())[: 3 if name == "short convolution" else 2]


OURS: dict[str, tuple[Op, int]] = {
    "short convolution": (partial(short_convolution, activation="silu"), 1792),
    "qkv convolution": (partial(qkv_convolution, n_heads=HEADS, key_dim=KEYS), 3 * HEADS * KEYS),
    "gated norm": (gated_rms_norm, 1536),
}
"""Each op, and its channels at 110M."""


def published(name: str) -> dict[str, Op]:
    """The installed kernels of others for the same op."""
    found: dict[str, Op] = {}
    if name == "short convolution" and importlib.util.find_spec("causal_conv1d"):
        fn = importlib.import_module("causal_conv1d").causal_conv1d_fn
        found["causal-conv1d CUDA"] = lambda x, w, b: fn(x.mT, w.to(x.dtype), b.to(x.dtype), activation="silu").mT
    if name == "short convolution" and importlib.util.find_spec("fla.modules"):
        fla = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
        found["fla"] = lambda x, w, b: fla(x=x, weight=w.to(x.dtype), bias=b.to(x.dtype), activation="silu")[0]
    if name == "gated norm" and importlib.util.find_spec("mamba_ssm"):
        rms = importlib.import_module("mamba_ssm.ops.triton.layernorm_gated").rmsnorm_fn
        found["mamba-ssm, without D x"] = lambda y, x, D, z, w: rms(y.flatten(2), w, None, z=z, norm_before_gate=False)
    return found


def rows() -> Iterator[Row]:
    """Time our op, the compiled reference and the installed kernels from CUDA graphs, also with backward.

    Called from Python, launches would take as long as the kernels.
    """
    for name, (op, channels) in OURS.items():
        tensors = tensors_of(name, 32, 2048, channels)
        shape = {"B": 32, "T": 2048, "H": channels, "D": HEAD if name == "gated norm" else WIDTH}
        torch.compiler.reset()
        compiled = torch.compile(partial(op, backend="reference"))
        ways = {"seqarch": op, "PyTorch, compiled": compiled, **published(name)}
        for way, run in ways.items():
            yield from passes(f"{name}, {way}", run, tensors, replay=True, **shape)
