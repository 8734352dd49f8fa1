"""MoBA's published codes, those that are installed, and a stand-in for FlashMoBA: what they compute from our call."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels import top1_chunk_attention
from tests.kernels import inputs
from tests.kernels.on_cuda import assert_as_float64

moba = pytest.importorskip("benchmarks.kernels.moba")  # its timings need Triton


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


def check(op, D, device):
    """As our op: outputs and gradients where queries see all earlier chunks, and outputs where they choose.

    The published gates round mean keys, so 3 % of the queries may choose another chunk than in float64.
    """

    def draw(T):
        return list(inputs.attention(1, T, 2, D, normalised=True, dtype=torch.bfloat16, device=device).values())

    def attend(*tensors, backend="", **options):
        if backend:
            return top1_chunk_attention(*tensors, selection="approx", backend=backend, **options)
        return op(*tensors, **options)

    assert_as_float64(attend, draw(9 * 128), 1e-2, remote_chunks=8)
    tensors = [t.detach() for t in draw(2048)]
    for count in (1, 8):
        wanted = attend(*(t.double() for t in tensors), backend="reference", remote_chunks=count)
        off = (op(*tensors, remote_chunks=count) - wanted).norm(dim=-1) > 0.05 * wanted.norm(dim=-1)
        assert off.double().mean() < 0.03


@pytest.mark.parametrize(
    ("function", "right"),
    [(attend, True), (fewer, False), (half, False)],
    ids=["right", "the own chunk not counted", "half the gradient"],
)
def test_a_stand_in(function, right, only_flash_moba):
    (op,) = only_flash_moba(function).values()
    with nullcontext() if right else pytest.raises(AssertionError):
        check(op, 16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", moba.PUBLISHED)
@pytest.mark.parametrize("D", [64, 128])
def test_on_cuda(name, D):
    for package in moba.PUBLISHED[name][2]:
        pytest.importorskip(package)
    check(moba.published()[name], D, "cuda")
