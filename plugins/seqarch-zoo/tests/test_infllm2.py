"""InfLLM2 keeps the contract and equals its formula written out, query by query."""

from typing import ClassVar

import pytest
import torch
from seqarch_zoo.infllm2 import InfLLM2, InfLLM2Core

from seqarch.errors import UserError
from seqarch.kernels import blocks
from seqarch.testing import MixerSuite

C, K, LOCAL = 8, 3, 1
H, HK, D = 6, 2, 4


class TestInfLLM2(MixerSuite):
    mixer = InfLLM2
    options: ClassVar = [
        {"n_heads": 4, "n_kv_heads": 2, "chunk_size": 4, "selected_chunks": 3, "local_chunks": 1},
        {"n_heads": 4, "chunk_size": 8, "selected_chunks": 2, "local_chunks": 1, "position": "none"},
    ]


def chosen(q, k, scale):
    """The chunks of the last query of one sequence, by key head, from windows of C / 2 keys every C / 4."""
    t = len(k) - 1
    own = t // C
    starts = range(0, t + 1 - C // 2 + 1, C // 4)
    result = []
    for head in range(HK):
        group = q[head * (H // HK) : (head + 1) * (H // HK)]
        mass = torch.zeros(own + 1, dtype=q.dtype)
        if starts:
            means = torch.stack([k[start : start + C // 2, head].mean(0) for start in starts])
            weights = (group @ means.T * scale).softmax(-1).sum(0)
            for weight, start in zip(weights, starts, strict=True):
                for chunk in range(own + 1):  # a chunk has the windows that share keys with it
                    if start < (chunk + 1) * C and start + C // 2 > chunk * C:
                        mass[chunk] = max(mass[chunk], weight)
        always = {0, *range(max(0, own - LOCAL), own)} - {own}
        others = sorted(set(range(own)) - always, key=lambda chunk: -mass[chunk].item())
        result.append({*always, *others[: K - len(always)]})
    return result


@pytest.mark.parametrize("small_blocks", [False, True])
@torch.no_grad()
def test_equals_the_formula(small_blocks, monkeypatch):
    if small_blocks:
        monkeypatch.setattr(blocks, "SCORE_BYTES", 1)
    torch.manual_seed(0)
    q, k, v = (2 * torch.randn(1, 61, n, D, dtype=torch.float64) for n in (H, HK, HK))
    core = InfLLM2Core(C, selected_chunks=K, local_chunks=LOCAL)
    found, different = core(q, k, v, scale=0.5), set()
    for t in range(61):
        own = t // C
        for head, chunks in enumerate(chosen(q[0, t], k[0, : t + 1], 0.5)):
            different.add(frozenset(chunks))
            seen = [j for j in range(t + 1) if j // C in {*chunks, own}]
            for h in range(head * (H // HK), (head + 1) * (H // HK)):
                weights = (k[0, seen, head] @ q[0, t, h] * 0.5).softmax(0)
                torch.testing.assert_close(found[0, t, h], weights @ v[0, seen, head])
    assert len(different) > 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 6}, "chunk_size must be a multiple of 4, not 6"),
        ({"selected_chunks": 2, "local_chunks": 2}, "selected_chunks=2 must hold the first and 2 local chunks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        InfLLM2(32, 0, 2, n_heads=4, **options)
