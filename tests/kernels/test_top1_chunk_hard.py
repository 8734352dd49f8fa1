"""Exact selection where the choice is hard, against masses in float64, with keys by descriptors and by addresses."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from seqarch.kernels import select_chunks
from seqarch.kernels.top1_chunk.op import chunk_masses
from tests.kernels import naive

C = 128
HARD = ("random", "equal chunks", "near ties", "drift", "skew", "largest plain scores", "smallest plain scores", "one")
GPU = pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)
INTERPRETER = [("cpu", torch.float16), ("cpu", torch.float32)]


@pytest.fixture(autouse=True)
def runs(request):
    on_gpu = request.node.get_closest_marker("gpu")
    request.getfixturevalue("poison") if on_gpu else [request.getfixturevalue(n) for n in ("interpreter", "poison")]


def hard_input(name, T, D, dtype, device):
    """q, k and scale."""
    q, k, _ = (t.detach() for t in naive.draw(1, T, 2, D, normalised=True))
    chunks = k[:, : T // C * C].unflatten(1, (-1, C))
    scale = {"largest plain scores": 79.0 / 1.03, "smallest plain scores": 0.2, "one": 1.0}.get(name, D**0.5)
    if name == "equal chunks":
        chunks[:, 1:] = chunks[:, :1].clone()
    elif name == "near ties":  # the same keys in another order, then one of them longer
        chunks[:, 1:] = chunks[:, :1].roll(1, 2)
        chunks[:, 1:, 0] *= 1 + 2.0**-7
    elif name == "drift":
        k = F.normalize(k + torch.linspace(0, 4, T).view(1, T, 1, 1) * k[:, :1], dim=-1)
    elif name == "skew":
        q = q[:, :1].repeat(1, T, 1, 1)
        k[:, :: C + 1] = q[:, :1]
    return q.to(device, dtype), k.to(device, dtype), scale


def assert_heaviest(chunks, q, k, scale):
    """Each query of a chunk after the first has an earlier chunk, whose mass is the largest within rounding."""
    T, n = q.shape[1], (q.shape[1] - 1) // C
    masses = chunk_masses(q.double(), k.double(), None, n, C, scale).transpose(1, 2)
    own = torch.arange(T, device=q.device).view(1, T, 1) // C
    assert ((chunks >= 0) == (own > 0)).all()
    assert (chunks < own.clamp_min(1)).all()
    masses = masses.masked_fill(torch.arange(n, device=q.device) >= own.unsqueeze(-1), float("-inf"))
    lost = masses.amax(-1) - masses.gather(-1, chunks.clamp_min(0).long().unsqueeze(-1)).squeeze(-1)
    assert lost[:, C:].max() < 4e-6


def described(k, chunk_size=C, cu_seqlens=None, K=1):
    from seqarch.kernels.top1_chunk import triton as kernels

    return kernels._described(k, kernels.chunk_layout(k.shape[1], chunk_size, cu_seqlens), chunk_size, 1, K)


CASES = [*((name, 1000) for name in HARD), ("near ties", 0), ("drift", 0)]
DESCRIBED = {"random", "near ties", "skew", "one"}
"""Inputs whose keys the interpreter reads by descriptors; it reads the others by addresses."""


@pytest.mark.parametrize(
    ("name", "short", "device", "dtype", "D"),
    [
        *((*case, "cpu", *((torch.float16, 128) if case[0] in DESCRIBED else (torch.float32, 64))) for case in CASES),
        *(
            pytest.param(*case, "cuda", torch.bfloat16, D, marks=pytest.mark.gpu)
            for case, D in itertools.product(CASES, (64, 128))
        ),
    ],
)
def test_choices(name, short, device, dtype, D, monkeypatch):
    from seqarch.kernels.top1_chunk import triton as kernels

    monkeypatch.setattr(kernels, "SHORT", short)
    q, k, scale = hard_input(name, 391 if device == "cpu" else 8301, D, dtype, device)
    assert (described(k) is None) == (dtype == torch.float32)
    chunks = select_chunks(q, k, chunk_size=C, scale=scale, backend="triton")
    assert_heaviest(chunks, q, k, scale)
    if name == "equal chunks":
        assert chunks.max() == 0


@pytest.mark.parametrize(("device", "dtype"), [INTERPRETER[1], GPU])
def test_powers_without_the_units_for_them(device, dtype):
    """As exact as float32, for all powers of plain scores."""
    import triton
    import triton.language as tl

    from seqarch.kernels.top1_chunk import triton_exact

    @triton.jit
    def kernel(x, y, power: tl.constexpr, N: tl.constexpr):
        o = tl.arange(0, N)
        tl.store(y + o, power(tl.load(x + o)))

    x = torch.linspace(-125, 125, 8192, device=device)
    y = torch.empty_like(x)
    launch: Any = kernel[(1,)]
    launch(x, y, triton_exact.fma_exp2, 8192)
    assert (y.double() / x.double().exp2() - 1).abs().max() < 2.0**-22


def half_a_token_apart(t):
    return F.pad(torch.cat([t, -t]).flatten(1), (0, 64))[:, :-64].unflatten(1, t.shape[1:])


VIEWS = {
    "slice of a projection": (lambda t: torch.cat([t, t], 2)[:, :, 1:3], True),
    "more rows": (lambda t: torch.cat([t, -t]), True),
    "one head": (lambda t: t[:, :, :1].contiguous(), True),
    "heads before positions": (lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), False),
    "a cache with room": (lambda t: torch.cat([t, -t]).flatten(0, 1).unflatten(0, (2, -1))[:, :-1], True),
    "half a token between rows": (half_a_token_apart, False),
    "odd address": (lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t), False),
    "odd stride": (lambda t: F.pad(t.flatten(2), (0, 4))[..., :-4].unflatten(2, (2, -1)), False),
    "one key for all": (lambda t: t[:, :1].expand_as(t), False),
}


@pytest.mark.parametrize(("device", "dtype"), [INTERPRETER[0], GPU])
@pytest.mark.parametrize("view", VIEWS)
def test_views(view, device, dtype):
    look, fits = VIEWS[view]
    q, k, scale = hard_input("random", 300, 64, dtype, device)
    k = look(k)
    q = q[:, : k.shape[1], : k.shape[2]].expand(k.shape[0], -1, -1, -1)
    assert (described(k) is not None) == fits
    assert_heaviest(select_chunks(q, k, chunk_size=C, scale=scale, backend="triton"), q, k, scale)


def test_what_is_read_by_addresses():
    k = torch.zeros(1, 300, 2, 64, dtype=torch.float16)
    borders = torch.tensor([0, 100, 300], dtype=torch.int32)
    assert described(k) is not None
    others = [described(k, 64), described(k, K=2), described(k, cu_seqlens=borders), described(k[..., :32])]
    assert others == [None] * 4
    assert described(k[:0]) is None


@pytest.mark.gpu
def test_keys_of_more_than_two_billion_elements():
    """The last head of the last queries, whose keys lie beyond; alone it chooses the same."""
    q = torch.randn(1, 256, 34, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 2**20, 34, 64, device="cuda", dtype=torch.bfloat16)
    assert described(k) is not None
    found, alone = (select_chunks(q, k, scale=0.3), select_chunks(q[:, :, -1:], k[:, :, -1:].contiguous(), scale=0.3))
    assert torch.equal(found[:, :, -1:], alone)
