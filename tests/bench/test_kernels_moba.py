"""`seqarch.bench.kernels_moba` with a stand-in for FlashMoBA: how it is called, and that its checks can fail."""

import sys
from types import SimpleNamespace

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels import inputs

moba = pytest.importorskip("seqarch.bench.kernels_moba")  # its timings need Triton


def attend(q, k, v, borders_q, borders_k, longest_q, longest_k, *sizes):
    """MoBA in plain PyTorch: a query sees its own chunk and those of the best mean keys, `top_k` in all."""
    chunk_size, top_k = sizes
    T = q.shape[0]
    assert q.dim() == 3
    assert borders_q.tolist() == borders_k.tolist() == [0, T]
    assert borders_q.dtype == torch.int32
    assert longest_q == longest_k == T
    own, chunks = torch.arange(T) // chunk_size, torch.arange(-(-T // chunk_size))
    means = torch.stack([chunk.mean(0) for chunk in k.float().split(chunk_size)]).bfloat16()
    gate = torch.einsum("thd,nhd->htn", q.float(), means.float()).detach()
    gate = gate.masked_fill(chunks > own[:, None], -torch.inf).masked_fill(chunks == own[:, None], torch.inf)
    seen = torch.zeros_like(gate).scatter_(-1, gate.topk(min(top_k, len(chunks))).indices, 1)
    seen = (seen.repeat_interleave(chunk_size, -1)[..., :T] > 0) & torch.ones(T, T).tril().bool()
    scores = torch.einsum("thd,shd->hts", q.float(), k.float()) * q.shape[-1] ** -0.5
    o = torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.float())
    return o.to(q.dtype)


def fewer(*args):
    return attend(*args[:-1], args[-1] - 1)


def half(*args):
    o = attend(*args)
    return o / 2 + o.detach() / 2


@pytest.fixture
def only_flash_moba(monkeypatch):
    def install(function):
        module = SimpleNamespace(flash_moba_varlen_func=function)
        monkeypatch.setitem(sys.modules, "flash_moba", module)
        monkeypatch.setattr(moba, "find_spec", {"flash_moba": module}.get)
        return moba.published()

    return install


def test_a_published_code_must_be_installed(monkeypatch):
    monkeypatch.setattr(moba, "find_spec", lambda package: None)
    with pytest.raises(UserError, match="flash-moba, or pip install flash-attn"):
        moba.rows()


def test_the_others_are_left_out(only_flash_moba, capsys):
    assert list(only_flash_moba(attend)) == ["FlashMoBA"]
    assert capsys.readouterr().out == "not installed and left out: MoBA, MoBA (fla)\n"


@pytest.mark.parametrize(
    ("function", "held"),
    [(attend, [True, True, True]), (fewer, [False, False, False]), (half, [False, True, True])],
    ids=["right", "the own chunk not counted", "half the gradient"],
)
def test_checks_can_fail(function, held, only_flash_moba, monkeypatch):
    def draw(B, T, H, D):
        return list(inputs.attention(B, T, H, D, normalised=True, dtype=torch.bfloat16, seed=0).values())

    monkeypatch.setattr(moba, "draw", draw)
    monkeypatch.setattr("seqarch.bench.kernels_check.poison", lambda: None)
    (op,) = only_flash_moba(function).values()
    assert list(moba.check("FlashMoBA", op, 16)) == held
