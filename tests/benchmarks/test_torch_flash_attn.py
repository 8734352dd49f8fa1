"""The stand-in for flash-attn: its calls fit PyTorch's operators, on tensors without data."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2] / "benchmarks/torch_flash_attn"


@pytest.fixture
def interface(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from flash_attn import flash_attn_interface  # pyright: ignore[reportMissingImports]

    yield flash_attn_interface
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        sys.modules.pop(name, None)


def test_it_serves_the_published_code(interface):
    q, k, v = (torch.empty(96, 3, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    borders = torch.empty(4, dtype=torch.int64, device="meta")
    packed = {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": 64, "max_seqlen_k": 64}
    options = {"dropout_p": 0.0, "softmax_scale": 0.125, "causal": True}
    out, lse, *_ = interface._flash_attn_varlen_forward(q=q, k=k, v=v, **packed, **options)
    assert out.shape == q.shape
    assert lse.shape == (3, 96)
    gradients = {name: torch.empty_like(q) for name in ("dq", "dk", "dv")}
    given = {"dout": out, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
    interface._flash_attn_varlen_backward(**given, **gradients, **packed, **options, window_size_left=-1)
