"""NSA keeps the contract and equals its formula written out, and flash-linear-attention's plain functions."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import blocks
from seqarch.kernels.tensors import bound_documents
from seqarch.mixers.nsa import NSA, NSACore, _attend
from seqarch.testing import MixerSuite
from tests.mixers.short_chunks import TRACED

C, K, W = 4, 4, 6
H, HK, D = 6, 2, 8


class TestNSA(MixerSuite):
    mixer = NSA
    compile_options: ClassVar = TRACED
    options: ClassVar = [
        {"n_heads": 4, "n_kv_heads": 2, "chunk_size": 3, "selected_chunks": 4, "window": 5},
        {"n_heads": 4, "n_kv_heads": 1, "chunk_size": 2, "selected_chunks": 3, "window": 2, "position": "none"},
        {"n_heads": 4, "chunk_size": 8, "qk_norm": True, "key_conv": 3},
    ]


def heads(length: int = 38) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, n, D, dtype=torch.float64, requires_grad=True) for n in (H, HK, HK))
    return q, k, v, torch.rand(2, length, H, 3, dtype=torch.float64, requires_grad=True)


def selection(weights: Tensor, t: int) -> set[int]:
    """The chunks of a query at position t, its own included; `weights` of earlier chunks, added up over a group."""
    own = t // C
    chosen = {0, max(own - 1, 0), own}
    for c in sorted(range(own), key=lambda c: -weights[c].item()):
        if len(chosen) < K:
            chosen.add(c)
    return chosen


def written_out(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, scale: float) -> Tensor:
    """The three branches, query by query; the selected and the window branch by masks over all T keys."""
    T, group = q.shape[1], H // HK
    j = torch.arange(T)
    rows = []
    for t in range(T):
        complete = (t + 1) // C
        outputs = torch.zeros(2, H, D, dtype=q.dtype)
        for b in range(2):
            for key_head in range(HK):
                keys, values = k[b, :, key_head], v[b, :, key_head]
                mine = q[b, t, key_head * group : (key_head + 1) * group]  # [G, D]
                weights = torch.zeros(group, T // C + 1, dtype=q.dtype)
                compressed = torch.zeros(group, D, dtype=q.dtype)
                if complete:
                    means = [each[: complete * C].view(complete, C, D).mean(1) for each in (keys, values)]
                    soft = (mine @ means[0].T * scale).softmax(-1)
                    compressed = soft @ means[1]
                    weights[:, :complete] = soft.detach()
                chosen = selection(weights.sum(0), t)
                masks = [torch.tensor([int(p) // C in chosen for p in j]) & (j <= t), (j <= t) & (j > t - W)]
                dense = [
                    ((mine @ keys.T) * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ values for mask in masks
                ]
                branches = torch.stack([compressed, *dense], dim=1)
                at = slice(key_head * group, (key_head + 1) * group)
                outputs[b, at] = (branches * gates[b, t, at, :, None]).sum(1)
        rows.append(outputs)
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("score_bytes", [blocks.SCORE_BYTES, 1])
def test_equals_the_formula_written_out(monkeypatch, score_bytes) -> None:
    monkeypatch.setattr(blocks, "SCORE_BYTES", score_bytes)  # 1: several blocks of queries, each computed again
    q, k, v, gates = given = heads()
    weight = torch.randn(2, q.shape[1], H, D, dtype=torch.float64)
    found = NSACore(C, selected_chunks=K, window=W)(q, k, v, scale=0.7, gates=gates)
    expected = written_out(*given, scale=0.7)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((each * weight).sum(), given) for each in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_selection_and_branches_are_those_of_fla() -> None:
    naive = pytest.importorskip("fla.ops.nsa.naive")
    q, k, v, gates = (t.detach().float() for t in heads(40))
    core = NSACore(C, selected_chunks=K, window=W)
    means = [t.unflatten(1, (-1, C)).mean(2) for t in (k, v)]
    theirs = naive.naive_nsa_topk(q, means[0], K, C, 0.7)
    ours = core.select(q, k, 0.7)[:, :, :: H // HK]
    own = torch.arange(40)[None, :, None, None] // C
    assert torch.equal(torch.cat([ours, own.expand(2, 40, HK, 1)], -1).sort(-1).values, theirs.sort(-1).values)
    gates[..., 2] = 0  # its window needs FlashAttention
    expected = gates[..., :1] * naive.naive_nsa_compression(q, *means, C, 0.7)[0]
    expected += gates[..., 1:2] * naive.naive_nsa_selection(q, k, v, theirs, C, 0.7)
    torch.testing.assert_close(core(q, k, v, scale=0.7, gates=gates), expected, rtol=1e-4, atol=1e-5)


def test_all_chunks_and_a_full_window_are_attention() -> None:
    q, k, v, _ = heads()
    core = NSACore(C, selected_chunks=10, window=38)
    for branch in (1, 2):
        gates = torch.zeros(2, 38, H, 3, dtype=torch.float64)
        gates[..., branch] = 1
        expected = blocks.sdpa(q, k, v, 0.7, is_causal=True)
        torch.testing.assert_close(core(q, k, v, scale=0.7, gates=gates), expected)


def test_too_few_selected_chunks_are_refused() -> None:
    with pytest.raises(UserError, match=r"selected_chunks must be at least 3, not 2"):
        NSA(32, 0, 1, n_heads=4, selected_chunks=2)


def test_counts() -> None:
    mixer = NSA(64, 0, 1, n_heads=4, n_kv_heads=2, chunk_size=4, selected_chunks=3, window=2)
    assert sum(p.numel() for p in mixer.parameters()) == 64 * (64 + 2 * 32) + 64 * 64 + 64 * 12
    # 10 queries: 0 0 0 1 1 1 1 2 2 2 means, 1 2 3 4 5 6 7 8 9 10 selected keys, 1 and nine times 2 keys of the window
    products = 4 * 16 * (10 + 55 + 19) / 10
    linear = 64 * (64 + 2 * 32) + 64 * 64 + 64 * 12
    assert mixer.flops_per_token(10) == pytest.approx(2 * linear + 4 * products)
    assert mixer.flops_per_token(10, training=True) == pytest.approx(6 * linear + 12 * products)


@pytest.mark.parametrize(("queries", "longest"), [(61, None), (29, 27)])
def test_compressed_documents_are_as_if_alone_and_need_no_new_graph(queries, longest):
    """Also empty ones and ones without a complete chunk; the queries are the last of the row."""
    core = NSACore(chunk_size=4, selected_chunks=4, window=8)
    q, k, v = (each[:1].detach().requires_grad_() for each in heads(61)[:3])

    def branches(q, k, v, cu_seqlens):
        cu_seqlens = cu_seqlens if longest is None else bound_documents(cu_seqlens, longest)
        q = q[:, -queries:]
        chunks = core.select(q, k, 1.0, cu_seqlens)
        return core._compress(_attend, q, k, v, 1.0, cu_seqlens, None), chunks

    def of_document(start, stop):
        own_q, own_k, own_v = (t[:, start:stop] for t in (q, k, v))
        return core.select(own_q, own_k, 1.0), core._compress(_attend, own_q, own_k, own_v, 1.0, None, None)

    torch.compiler.reset()
    compiled = torch.compile(branches, fullgraph=True, backend="aot_eager")
    for number, borders in enumerate([(0, 3, 3, 30, 57, 61), (0, 5, 29, 34, 61, 61)]):
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            attended, chunks = compiled(q, k, v, torch.tensor(borders, dtype=torch.int32))
        wanted, expected = zip(
            *(of_document(*pair) for pair in itertools.pairwise(borders) if pair[0] < pair[1]), strict=True
        )
        assert torch.equal(chunks, torch.cat(wanted, dim=1)[:, -queries:])
        expected = torch.cat(expected, dim=1)[:, -queries:]
        torch.testing.assert_close(attended, expected, rtol=1e-12, atol=1e-13)
        direction = torch.randn_like(expected)
        got, wanted = (torch.autograd.grad(each, (q, k, v), direction) for each in (attended, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
