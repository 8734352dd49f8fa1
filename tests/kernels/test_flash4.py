"""FlashAttention-4 as a backend of softmax attention, on a Hopper GPU."""

from functools import partial

import pytest
import torch

from seqarch.kernels import softmax_attention
from seqarch.kernels.packages import is_installed
from tests.kernels.on_cuda import assert_as_float64, assert_within, draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poison"),
    pytest.mark.skipif(not is_installed("flash-attn-4"), reason="needs flash-attn-4"),
]
fa4 = partial(softmax_attention, backend="fa4")


def cut(*sizes: int) -> torch.Tensor:
    return torch.tensor([0, *sizes], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize(
    ("B", "T", "H", "HK", "D", "window"),
    [
        *((2, 1, 2, 2, 64, None), (2, 129, 4, 2, 64, None), (1, 1000, 4, 1, 128, None), (1, 4097, 2, 2, 64, None)),
        *((1, 515, 2, 2, 256, None), (1, 300, 2, 2, 192, None), (1, 1000, 4, 2, 64, 100), (2, 700, 2, 2, 128, 33)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_as_float64(B, T, H, HK, D, window, dtype):
    tensors = draw(B, T, H, D, HK=HK, dtype=dtype)
    assert_as_float64(softmax_attention, tensors, 1e-2, scale=8.0, window=window, backend="fa4")


@pytest.mark.parametrize("window", [None, 64])
def test_documents(window):
    options = {"window": window, "cu_seqlens": cut(1, 129, 570, 300), "backend": "fa4"}
    assert_as_float64(softmax_attention, draw(1, 1000, 4, 64, HK=2), 1e-2, scale=8.0, **options)


@pytest.mark.parametrize("window", [None, 64])
def test_last_queries(window):
    tensors = [draw(2, 300, 4, 64)[0], *draw(2, 1000, 4, 64, HK=2)[1:]]
    assert_as_float64(softmax_attention, tensors, 1e-2, scale=8.0, window=window, backend="fa4")


@pytest.mark.parametrize("HK", [2, 8])
def test_gradients_repeat_bit_for_bit(HK):
    tensors = draw(4, 5000, 8, 64, HK=HK)
    do = torch.randn_like(tensors[0])
    first, again = (torch.autograd.grad(fa4(*tensors), tensors, do) for _ in range(2))
    assert all(map(torch.equal, first, again))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_graphs_hold_it():
    tensors = draw(2, 1000, 4, 64, HK=2)
    compiled = torch.compile(lambda q, k, v: fa4(2 * q, k, v), fullgraph=True)
    do = torch.randn_like(tensors[0])
    wanted = torch.autograd.grad(fa4(2 * tensors[0], *tensors[1:]), tensors, do)
    assert_within(torch.autograd.grad(compiled(*tensors), tensors, do), wanted, 1e-2)
