"""Small cases of our Triton kernels, forward and backward, for NVIDIA's compute-sanitizer.

    python -m benchmarks.sanitize top1_several          # compiles the kernels, so that the next run is short
    compute-sanitizer --tool memcheck python -m benchmarks.sanitize top1_several
    compute-sanitizer --tool memcheck python -m benchmarks.sanitize out_of_bounds   # must report errors

PyTorch takes memory from the driver for each tensor here. Its cache would hide accesses beyond the end of a tensor.
Lengths are odd, so that the last tile of each kernel is partly empty.
"""

import argparse
import os

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels import (
    attention_decode,
    attention_entropy,
    gated_rms_norm,
    qkv_convolution,
    select_chunks,
    selective_scan,
    short_convolution,
    ssd,
    top1_chunk_attention,
    top1_chunk_decode,
    top1_element_attention,
)
from tests.kernels import inputs

CHUNK = 32
LENGTHS = [1.0, 40.0, 1000.0]
"""Two blocks of queries have the same length. Their masses are summed by a polynomial, plainly or by logarithms."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
"""Without a GPU the cases run in Triton's interpreter (TRITON_INTERPRET=1), whose bf16 products are wrong."""


def run(op: Callable[..., Any], arguments: dict[str, Any], **options: Any) -> None:
    """Call our kernels on copies of the tensors, and their backward pass if there is one.

    Raises:
        ArithmeticError: a result is not finite.
    """
    given = {name: on_device(value) for name, value in arguments.items()}
    found = op(**given, **options, backend="triton")
    results = list(found) if isinstance(found, tuple) else [found]
    leaves = [t for t in given.values() if isinstance(t, Tensor) and t.requires_grad]
    if leaves and results[0].requires_grad:
        outputs = [t for t in results if t.requires_grad]
        results += torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs])
    if not all(t.detach().cpu().isfinite().all() for t in results):
        raise ArithmeticError(f"{op.__name__} gives numbers that are not finite")


def on_device(value: Any) -> Any:
    """The argument on the GPU. It was drawn on the CPU, so that fewer kernels of PyTorch run under the sanitizer."""
    return value.detach().to(DEVICE).requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def packed(*borders: int) -> Tensor:
    return torch.tensor(borders, dtype=torch.int32, device=DEVICE)


def attention(*sizes: int, **options: Any) -> dict[str, Any]:
    return inputs.attention(*sizes, normalised=True, dtype=DTYPE, **options)


def top1(remote_chunks: int) -> None:
    """Exact selection among few chunks, attention and entropy."""
    options = {"chunk_size": CHUNK, "remote_chunks": remote_chunks}
    run(top1_chunk_attention, attention(1, 131, 4, 64, HK=2), **options)
    q, k, _ = (t.detach() for t in attention(1, 131, 2, 64).values())
    chunks = select_chunks(q, k, backend="reference", **options).to(DEVICE)
    run(attention_entropy, {"q": q, "k": k}, chunk_size=CHUNK, chunks=chunks)


def top1_bounds(remote_chunks: int) -> None:
    """Exact selection by bounds, which leave some chunks or all, for scores of each of three sizes."""
    from seqarch.kernels.top1_chunk import triton as kernels

    tokens = 19 * CHUNK + 5
    lengths = torch.tensor(LENGTHS).repeat_interleave(128).repeat(2)[:tokens, None, None]
    for D in (64, 128):
        q, k, v = (t.detach() for t in attention(1, tokens, 1, D).values())
        q = (F.normalize(q + 3 * q[:, :1], dim=-1) * lengths).to(DTYPE)
        alike = k[:, ::CHUNK].bfloat16().to(DTYPE).repeat_interleave(CHUNK, 1)[:, :tokens]  # equal keys: tight bounds
        for keys in (k, alike):
            arguments = {name: t.clone().requires_grad_() for name, t in {"q": q, "k": keys, "v": v}.items()}
            with patch.object(kernels, "SHORT", 0):
                run(top1_chunk_attention, arguments, chunk_size=CHUNK, remote_chunks=remote_chunks, scale=0.125)


def top1_approx(remote_chunks: int, borders: list[int] | None = None) -> None:
    """Approximate selection, and documents packed in one row."""
    options = {"chunk_size": CHUNK, "selection": "approx", "remote_chunks": remote_chunks}
    if borders:
        options["cu_seqlens"] = packed(*borders)
    run(top1_chunk_attention, attention(1, 131, 4, 64, HK=2), **options)


def large(case: Callable[[], None]) -> None:
    """A case by the kernels of large inputs: two passes of approximate selection, groups of heads, split chunks."""
    from seqarch.kernels.top1_chunk import triton as kernels

    with patch.multiple(kernels, LONG=1, GROUP_BYTES=0, UNIT=16):
        case()


def decode() -> None:
    """Top-1 chunk decoding with one and several remote chunks."""
    arguments = inputs.decoding(2, 299, 4, 64, HK=2, dtype=DTYPE)
    arguments["lengths"][0] = 1
    means = arguments["k_cache"][:, : 9 * CHUNK].float().unflatten(1, (9, CHUNK)).mean(2)
    for K in (1, 3, 8):
        run(top1_chunk_decode, arguments, chunk_size=CHUNK, remote_chunks=K)
        run(
            top1_chunk_decode,
            {**arguments, "chunk_means": means},
            chunk_size=CHUNK,
            remote_chunks=K,
            selection="approx",
        )


def dense_decode() -> None:
    """Decoding with dense attention from a ring."""
    arguments = inputs.decoding(2, 299, 4, 64, HK=2, dtype=DTYPE)
    arguments["lengths"][:] = torch.tensor([1, 1000])
    for hard in (False, True):
        run(attention_decode, arguments, hard=hard)


def convolution() -> None:
    """The short convolution, also of packed documents."""
    borders = packed(0, 5, 5, 131)
    for W in (2, 4):
        arguments = inputs.short_convolution(1, 131, 149, W, dtype=DTYPE)
        run(short_convolution, arguments, activation="silu")
        run(short_convolution, arguments, cu_seqlens=borders)


def recurrences() -> None:
    """Mamba-1's and Mamba-2's recurrences of packed documents, whose tables kernels make too."""
    run(selective_scan, inputs.selective_scan(1, 131, 72, 16, dtype=DTYPE), cu_seqlens=packed(0, 5, 5, 131))
    run(ssd, inputs.ssd(1, 270, 4, 64, 1, 64, dtype=DTYPE), cu_seqlens=packed(0, 1, 140, 140, 270))


def qkv() -> None:
    """The convolution of queries, keys and values."""
    for K, V in ((24, 40), (96, 192)):
        run(qkv_convolution, inputs.qkv_convolution(2, 131, 2, K, V, dtype=DTYPE))


def norm() -> None:
    """Mamba-2's gated norm."""
    for H, P, groups in ((6, 20, 2), (24, 64, 1)):
        run(gated_rms_norm, inputs.gated_norm(2, 131, H, P, dtype=DTYPE), n_groups=groups)


def out_of_bounds() -> None:
    """Write one element beyond a tensor, which memcheck must find."""
    import triton
    import triton.language as tl

    @triton.jit
    def beyond_kernel(p, n, BLOCK: tl.constexpr):
        tl.store(p + tl.arange(0, BLOCK), 1.0, mask=tl.arange(0, BLOCK) <= n)

    beyond_kernel[(1,)](torch.zeros(512, device=DEVICE), 512, 1024)


CASES: dict[str, Callable[[], None]] = {
    "packed_recurrences": recurrences,
    "top1_large": lambda: large(lambda: top1_approx(1, [0, 1, 40, 40, 131])),
    "top1_several_large": lambda: large(lambda: top1_approx(3)),
    "top1_bounds": lambda: top1_bounds(1),
    "top1_several_bounds": lambda: top1_bounds(3),
    "top1_several": lambda: top1(3),
    "top1_several_packed": lambda: top1_approx(3, [0, 1, 40, 40, 131]),
    "top1_eight": lambda: top1_approx(8),
    "top1_decode": decode,
    "dense_decode": dense_decode,
    "short_convolution": convolution,
    "qkv_convolution": qkv,
    "gated_norm": norm,
    "top1_chunk": lambda: top1(1),
    "top1_chunk_approx": lambda: top1_approx(1),
    "top1_element": lambda: run(top1_element_attention, attention(2, 131, 4, 64, HK=2)),
    "selective_scan": lambda: run(selective_scan, inputs.selective_scan(2, 131, 72, 16, dtype=DTYPE)),
    "ssd": lambda: run(ssd, inputs.ssd(2, 270, 4, 64, 1, 64, dtype=DTYPE)),  # its rows are walked in two pieces
}
"""The newest kernels come first."""


def check(names: Iterable[str]) -> None:
    for name in names:
        print(f"{name}:", end=" ", flush=True)
        out_of_bounds() if name == "out_of_bounds" else CASES[name]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print("ran, results are finite", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=[*CASES, "out_of_bounds"])
    check(parser.parse_args().cases)


if __name__ == "__main__":
    main()
