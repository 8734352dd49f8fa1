"""The short convolution's kernels, under Triton's interpreter and on a GPU; the reference is tested with the layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import qkv_convolution, short_convolution
from seqarch.kernels.short_convolution import op
from tests.kernels import naive

interpreted = pytest.mark.usefixtures("interpreter", "poison")


def draw(B: int, T: int, C: int, W: int, *, bias: bool, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """x (channels of a wider tensor), weight and bias, with gradients."""
    generator = torch.Generator().manual_seed(B + T + C + W)
    shapes = [(B, T, C + 8), (C, W), (C,)]
    x, weight, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    leaves = [t.to(device, d).requires_grad_() for t, d in ((x, dtype), (weight, torch.float32), (b, torch.float32))]
    return leaves if bias else [*leaves[:2], None]


def borders_of(documents: list[int], device: str = "cpu") -> Tensor:
    """`cu_seqlens` of documents of these lengths."""
    return torch.tensor([0, *itertools.accumulate(documents)], dtype=torch.int32, device=device)


def compare(inputs: list[Any], *, ratio: float, **options: Any) -> None:
    """Output and all gradients of the kernels against the reference in float64."""
    wide = [None if t is None else t.detach().double().requires_grad_() for t in inputs]

    def run(tensors: list[Any], backend: Any) -> tuple[Tensor, list[Tensor]]:
        x, weight, bias = tensors
        y = short_convolution(x[..., : weight.shape[0]], weight, bias, backend=backend, **options)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
        return y, list(torch.autograd.grad(y, [t for t in tensors if t is not None], dy))

    (y, gradients), (expected, wanted) = run(inputs, "triton"), run(wide, "reference")
    naive.assert_close(y, expected, ratio)
    for index, (a, b) in enumerate(zip(gradients, wanted, strict=True)):
        assert a.dtype == [t for t in inputs if t is not None][index].dtype
        naive.assert_close(a, b, ratio, name=f"gradient {index}")


def compare_qkv(inputs: list[Any], n_heads: int, key_dim: int, *, ratio: float, **options: Any) -> None:
    """Output and all gradients of `qkv_convolution` against the reference in float64."""
    x, weight = inputs[0], inputs[1]
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]

    def run(x: Tensor, weight: Tensor, backend: Any) -> tuple[list[Tensor], list[Tensor]]:
        qkv = list(qkv_convolution(x[..., : weight.shape[0]], weight, n_heads, key_dim, backend=backend, **options))
        generator = torch.Generator().manual_seed(1)
        dy = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in qkv]
        return qkv, list(torch.autograd.grad(qkv, [x, weight], dy))

    (qkv, gradients), (expected, wanted) = run(x, weight, "triton"), run(wide[0], wide[1], "reference")
    for name, a, b in zip("qkv", qkv, expected, strict=True):
        assert a.is_contiguous()
        naive.assert_close(a, b, ratio, name=name)
    for index, (a, b) in enumerate(zip(gradients, wanted, strict=True)):
        naive.assert_close(a, b, ratio, name=f"gradient {index}")


@pytest.fixture
def small(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of few tokens, so that a short sequence has several."""
    from seqarch.kernels.short_convolution import triton as kernels

    for name, tile in (("FORWARD", kernels.FORWARD), ("BACKWARD", kernels.BACKWARD)):
        monkeypatch.setattr(kernels, name, tile._replace(segment=4, rows=2, channels=8))


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("B", "T", "C", "W", "bias", "activation"),
    [
        (2, 1, 8, 4, True, "silu"),
        (2, 21, 11, 4, False, None),
        (1, 16, 8, 3, True, None),
        (1, 16, 11, 4, False, "silu"),
        (1, 9, 5, 2, False, "silu"),
    ],
)
def test_same_as_the_reference(B: int, T: int, C: int, W: int, bias: bool, activation: Any) -> None:
    compare(draw(B, T, C, W, bias=bias, dtype=torch.float32), ratio=1e-6, activation=activation)


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("documents", "W"), [([1, 2, 3, 15], 2), ([5, 0, 16], 4), ([1] * 21, 3)])
def test_packed_documents(documents: list[int], W: int) -> None:
    borders = borders_of(documents)
    inputs = draw(1, 21, 11, W, bias=True, dtype=torch.float32)
    compare(inputs, ratio=1e-6, activation="silu", cu_seqlens=borders)


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("B", "T", "H", "K", "V", "W"), [(2, 1, 1, 4, 4, 4), (1, 13, 2, 6, 9, 4), (1, 9, 1, 8, 16, 3), (1, 6, 1, 40, 50, 2)]
)
def test_queries_keys_and_values(B: int, T: int, H: int, K: int, V: int, W: int) -> None:
    inputs = draw(B, T, 2 * H * K + H * V, W, bias=False, dtype=torch.float32)
    compare_qkv(inputs, H, K, ratio=2e-6)


@interpreted
@pytest.mark.usefixtures("small")
def test_queries_keys_and_values_of_packed_documents() -> None:
    borders = torch.tensor([0, 1, 1, 9, 21], dtype=torch.int32)
    compare_qkv(draw(1, 21, 18, 4, bias=False, dtype=torch.float32), 1, 6, ratio=2e-6, cu_seqlens=borders)


@interpreted
def test_half_precision_and_the_tiles_of_a_gpu() -> None:
    compare(draw(1, 70, 72, 4, bias=True, dtype=torch.float16), ratio=1e-3, activation="silu")
    compare_qkv(draw(1, 70, 72, 4, bias=False, dtype=torch.float16), 1, 24, ratio=1e-3)


def test_queries_and_keys_have_unit_length() -> None:
    x, weight, _ = draw(2, 13, 28, 4, bias=False, dtype=torch.float64)
    q, k, v = qkv_convolution(x[..., :28], weight, 2, 4)
    assert q.shape == k.shape == (2, 13, 2, 4)
    y = short_convolution(x[..., :28], weight, activation="silu")
    torch.testing.assert_close(v, y[..., 16:].unflatten(-1, (2, 6)))
    for t, part in ((q, y[..., :8]), (k, y[..., 8:16])):
        length = part.unflatten(-1, (2, 4)).norm(dim=-1, keepdim=True)
        torch.testing.assert_close(t * (length**2 + 1e-6).sqrt(), part.unflatten(-1, (2, 4)))


@interpreted
@pytest.mark.usefixtures("small")
def test_strides_of_any_kind() -> None:
    """Strided weights, one bias for all channels, one token per row, and the gradient of a sum."""
    for x in (torch.randn(2, 6, 5).mT, torch.randn(1, 3, 6).transpose(0, 1)):
        leaves = [t.requires_grad_() for t in (x, torch.randn(6, 8)[:, ::2], torch.randn(1).expand(6))]
        found, expected = (
            short_convolution(*leaves, activation="silu", backend=backend) for backend in ("triton", "reference")
        )
        naive.assert_close(found, expected, 1e-6)
        for a, b in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (found, expected)), strict=True):
            naive.assert_close(a, b, 1e-6)


@interpreted
@pytest.mark.usefixtures("small")
def test_what_the_window_does_not_reach_is_not_touched() -> None:
    """With W = 3, the token three places back has no effect, even if it is infinite."""
    x, weight, _ = draw(1, 12, 8, 3, bias=False, dtype=torch.float32)
    x = x.detach()
    x[:, 4] = float("inf")
    y = short_convolution(x[..., :8], weight, backend="triton")
    assert y[:, 7:].isfinite().all()
    assert not y[:, 4:7].isfinite().any()


def test_backends_that_cannot_run_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, weight, _ = draw(1, 5, 3, 4, bias=False, dtype=torch.float32)
    x = x[..., :3]
    with pytest.raises(UserError, match="the tensors are on cpu, not on a CUDA device"):
        short_convolution(x, weight, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    with pytest.raises(UserError, match="outputs that see 5 tokens; it takes 2 to 4"):
        short_convolution(x, torch.randn(3, 5), backend="triton")
    with pytest.raises(UserError, match="it does not take float64"):
        short_convolution(x.double(), weight, backend="triton")
    with pytest.raises(UserError, match="keys of 257 dims are more than it holds, 256"):
        qkv_convolution(torch.zeros(1, 5, 515), torch.zeros(515, 4), 1, 257, backend="triton")
    monkeypatch.setattr(op, "TRITON_LENGTH", 4)
    with pytest.raises(UserError, match="1 rows of 5 tokens; it takes 65535 rows of 4"):
        short_convolution(x, weight, backend="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
        ({"activation": "relu"}, "unknown activation 'relu': expected None or silu"),
        ({"weight": torch.zeros(4, 4)}, r"weight must have shape \[C, W\] = \[3, W\], not \[4, 4\]"),
        ({"weight": torch.zeros(3, 0)}, "W must be at least 1"),
        ({"x": torch.zeros(1, 5, 3).int()}, "x must be of dtype floating-point on cpu, not torch.int32"),
        ({"bias": torch.zeros(4)}, r"bias must have shape \[C\] = \[3\], not \[4\]"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens must be int32"),
        ({"cu_seqlens": torch.tensor([0, 4]).int()}, r"cu_seqlens must rise from 0 to T = 5, not \[0, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 5]).int()}, "cu_seqlens must rise from 0 to T = 5"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        short_convolution(**{"x": torch.zeros(1, 5, 3), "weight": torch.zeros(3, 4), **change})


@pytest.mark.parametrize(("channels", "heads"), [(12, 2), (15, 2), (18, 0)])
def test_channels_that_are_no_queries_keys_and_values(channels: int, heads: int) -> None:
    with pytest.raises(
        UserError, match=rf"{channels} channels are not 2 \* {heads} \* 3 .q, k. and values of {heads} heads"
    ):
        qkv_convolution(torch.zeros(1, 5, channels), torch.zeros(channels, 4), heads, 3)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "ratio"), [(torch.bfloat16, 5e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("H", "K", "V"), [(8, 96, 96), (6, 96, 192), (3, 64, 40), (2, 200, 256)])
@pytest.mark.parametrize("documents", [None, [1000, 1, 0, 999]])
def test_queries_keys_and_values_on_cuda(
    dtype: torch.dtype, ratio: float, H: int, K: int, V: int, documents: Any
) -> None:
    borders = borders_of(documents, "cuda") if documents else None
    B, C = 1 if documents else 3, 2 * H * K + H * V
    compare_qkv(draw(B, 2000, C, 4, bias=False, dtype=dtype, device="cuda"), H, K, ratio=ratio, cu_seqlens=borders)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "ratio"), [(torch.bfloat16, 5e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("C", "W", "bias"), [(2304, 4, False), (328, 3, True), (37, 2, True)])
@pytest.mark.parametrize("documents", [None, [1000, 1, 0, 999]])
def test_on_cuda(dtype: torch.dtype, ratio: float, C: int, W: int, bias: bool, documents: Any) -> None:
    borders = borders_of(documents, "cuda") if documents else None
    inputs = draw(1 if documents else 3, 2000, C, W, bias=bias, dtype=dtype, device="cuda")
    compare(inputs, ratio=ratio, activation="silu", cu_seqlens=borders)


@pytest.mark.gpu
def test_compiled_on_cuda() -> None:
    x, weight, bias = draw(2, 300, 64, 4, bias=True, dtype=torch.bfloat16, device="cuda")

    def run(x: Tensor) -> Tensor:
        return short_convolution(2 * x[..., :64], weight, bias, activation="silu")

    compiled = torch.compile(run, fullgraph=True)
    dy = torch.randn(2, 300, 64, device="cuda").bfloat16()
    for a, b in zip(*(torch.autograd.grad(f(x), [x, weight, bias], dy) for f in (compiled, run)), strict=True):
        naive.assert_close(a, b, 1e-3)
