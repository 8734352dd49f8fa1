"""The attention family keeps the mixer contract, and equals its formulas written out."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels.op import LEFT
from seqarch.mixers.attention import Attention, CoreAttention, Top1Chunk, Top1Element
from seqarch.mixers.cores import Selection
from seqarch.mixers.positions import ScaledRoPE, alibi_slopes
from seqarch.testing import MixerSuite
from seqarch.testing.compare import relative_error
from seqarch.testing.harness import Inputs, MixerHarness
from tests.kernels.precision import assert_near_float64
from tests.mixers.gradients import outputs_and_gradients
from tests.mixers.short_chunks import TRACED


class TestAttention(MixerSuite):
    mixer = Attention
    options: ClassVar = [
        {"n_heads": 4},
        {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "window": 5, "bias": True, "key_conv": 3},
        {"n_heads": 6, "n_kv_heads": 1, "head_dim": 4, "position": "alibi", "window": 7},
        {"n_heads": 2, "position": "none", "qk_norm": True, "temperature": 0.1},
        {
            "n_heads": 4,
            "n_kv_heads": 2,
            "qk_norm": "weighted",
            "qk_norm_eps": 1e-5,
            "bias": "qkv",
            "position": partial(ScaledRoPE, factor=4.0, rule="llama3", original_length=16),
        },
        {"n_heads": 4, "relation": "constant_keys", "max_length": 64},
        {"n_heads": 4, "relation": "constant_queries_keys", "max_length": 64, "qk_norm": True},
    ]


class TestTop1Element(MixerSuite):
    mixer = Top1Element
    options: ClassVar = [{"n_heads": 4}, {"n_heads": 4, "n_kv_heads": 2, "position": "none", "qk_norm": False}]
    # For a few queries, rounding changes which of two nearly equal scores is the highest.
    bfloat16_tolerance = 0.15
    differentiable = False


class TestTop1Chunk(MixerSuite):
    mixer = Top1Chunk
    compile_options: ClassVar = TRACED
    options: ClassVar = [
        {"n_heads": 4, "chunk_size": 8},
        {"n_heads": 4, "n_kv_heads": 2, "chunk_size": 5, "temperature": 0.2, "remote_chunks": 2},
        {
            "n_heads": 4,
            "n_kv_heads": 2,
            "chunk_size": 5,
            "selection": "approx",
            "position": "none",
            "qk_norm": False,
            "remote_chunks": 2,
        },
        {"n_heads": 4, "chunk_size": 8, "selection": "approx", "key_conv": 3},
    ]


def build(mixer: type[CoreAttention], **options: Any) -> CoreAttention:
    torch.manual_seed(0)
    built = mixer(32, 0, 2, n_heads=4, **options).double()
    with torch.no_grad():
        built.qkv.weight.normal_(std=0.3)
    return built


def projected(mixer: CoreAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[B, H, T, D]` of a mixer with equal numbers of heads and without position encoding."""
    q, k, v = mixer.qkv(x).chunk(3, dim=-1)
    return tuple(part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (q, k, v))


def causal_softmax(scores: Tensor) -> Tensor:
    length = scores.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(dim=-1)


def output(mixer: CoreAttention, o: Tensor) -> Tensor:
    return mixer.out(o.transpose(1, 2).flatten(2))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 21, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_attention_is_softmax_of_scaled_products(x: Tensor) -> None:
    mixer = build(Attention, position="none")
    q, k, v = projected(mixer, x)
    weights = causal_softmax(q @ k.mT / math.sqrt(8))
    torch.testing.assert_close(mixer(x), output(mixer, weights @ v))
    entropy = -torch.xlogy(weights, weights).sum(-1).transpose(1, 2)
    torch.testing.assert_close(mixer.attention_entropy(x).double(), entropy, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("temperature", "divisor"), [(None, 8**-0.5), (0.3, 0.3)])
def test_normalised_scores_are_cosines_over_the_temperature(
    x: Tensor, temperature: float | None, divisor: float
) -> None:
    mixer = build(Attention, position="none", qk_norm=True, temperature=temperature)
    q, k, v = projected(mixer, x)
    cosines = torch.nn.functional.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
    torch.testing.assert_close(mixer(x), output(mixer, causal_softmax(cosines / divisor) @ v), rtol=1e-5, atol=1e-6)


def test_temperature_without_normalisation_divides_the_products(x: Tensor) -> None:
    mixer = build(Attention, position="none", temperature=5.0)
    q, k, v = projected(mixer, x)
    torch.testing.assert_close(mixer(x), output(mixer, causal_softmax(q @ k.mT / 5) @ v))


def test_a_convolution_of_the_keys_is_added_to_them(x: Tensor) -> None:
    mixer = build(Attention, position="none", key_conv=3)
    q, k, v = projected(mixer, x)
    assert mixer.convolution is not None
    taps = mixer.convolution.weight.view(4, 1, 8, 3)
    before = torch.nn.functional.pad(k, (0, 0, 2, 0))
    convolved = sum(taps[..., j] * before[:, :, j : j + 21] for j in range(3))
    keys = k + torch.nn.functional.silu(torch.as_tensor(convolved))
    torch.testing.assert_close(mixer(x), output(mixer, causal_softmax(q @ keys.mT / math.sqrt(8)) @ v))
    state = (3 - 1) * 4 * 8 * 2  # two keys in bf16
    assert mixer.state_bytes(10) == build(Attention).state_bytes(10) + state
    assert mixer.flops_per_token(21) == build(Attention).flops_per_token(21) + 2 * 3 * 4 * 8


@pytest.mark.parametrize("selection", ["exact", "approx"])
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 1e-4),
        pytest.param("cuda", torch.float32, 1e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
    ],
)
def test_chunks_of_convolved_keys_against_float64(
    selection: Selection, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Outputs and gradients, and the outputs token by token. No chunk is nearly as good as the selected one."""
    torch.manual_seed(0)
    mixer = Top1Chunk(128, 0, 2, n_heads=2, chunk_size=16, selection=selection, position="none", key_conv=3)
    with torch.no_grad():
        mixer.qkv.weight.normal_(std=0.1)
    x = (torch.randn(2, 6, 1, 128) + 0.05 * torch.randn(2, 6, 16, 128)).flatten(1, 2)[:, :90].to(device, dtype)
    exact = outputs_and_gradients(copy.deepcopy(mixer.to(device, dtype)).double(), x.double())
    assert_near_float64(outputs_and_gradients(mixer, x), exact, tolerance)
    with torch.no_grad():
        pieces = MixerHarness().run_pieces(mixer, Inputs(x), [70, 17, 1, 1, 1])
    assert relative_error(pieces, exact["y"]) < tolerance


def test_a_convolution_needs_real_keys_and_two_tokens() -> None:
    with pytest.raises(UserError, match="key_conv=3 convolves real keys: leave it out, or set relation to real"):
        build(Attention, relation="constant_keys", max_length=64, key_conv=3)
    with pytest.raises(UserError, match="key_conv must be at least 2, not 1"):
        build(Top1Chunk, key_conv=1)


def test_alibi_subtracts_slope_times_distance(x: Tensor) -> None:
    mixer = build(Attention, position="alibi")
    q, k, v = projected(mixer, x)
    time = torch.arange(21)
    bias = alibi_slopes(4)[:, None, None] * (time[:, None] - time)
    torch.testing.assert_close(mixer(x), output(mixer, causal_softmax(q @ k.mT / math.sqrt(8) - bias) @ v))


def test_window_holds_that_many_keys(x: Tensor) -> None:
    mixer = build(Attention, position="none", window=3)
    q, k, v = projected(mixer, x)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(21, 21, dtype=torch.bool).tril(-3), -math.inf)
    torch.testing.assert_close(mixer(x), output(mixer, causal_softmax(scores) @ v))


def test_constant_keys_do_not_depend_on_the_input(x: Tensor) -> None:
    mixer = build(Attention, position="none", relation="constant_keys", max_length=30)
    assert mixer.qkv.out_features == 2 * 32
    q, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in mixer.qkv(x).chunk(2, dim=-1))
    assert mixer.constant_keys is not None
    k = mixer.constant_keys[:21].transpose(0, 1)
    torch.testing.assert_close(mixer(x), output(mixer, causal_softmax(q @ k.mT / math.sqrt(8)) @ v))


def test_constant_queries_and_keys_weigh_every_input_alike(x: Tensor) -> None:
    mixer = build(Attention, relation="constant_queries_keys", max_length=21)
    torch.testing.assert_close(mixer(x) + mixer(-x), torch.zeros_like(x))
    entropy = mixer.attention_entropy(x)
    assert torch.equal(entropy, mixer.attention_entropy(-x))


def test_constants_start_as_large_as_projected_keys() -> None:
    torch.manual_seed(0)
    mixer = Attention(256, 0, 2, n_heads=4, relation="constant_keys", max_length=64)
    real = Attention(256, 0, 2, n_heads=4)
    keys = real.qkv(torch.randn(64, 256)).chunk(3, dim=-1)[1]
    assert mixer.constant_keys is not None
    assert mixer.constant_keys.std().item() == pytest.approx(keys.std().item(), rel=0.05)


def test_top1_element_takes_the_value_of_the_best_key(x: Tensor) -> None:
    mixer = build(Top1Element, position="none")
    q, k, v = projected(mixer, x)
    weights = causal_softmax(torch.nn.functional.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1))
    best = weights.argmax(dim=-1)
    chosen = v.gather(2, best[..., None].expand_as(v))
    torch.testing.assert_close(mixer(x), output(mixer, chosen))


@pytest.mark.parametrize("remote_chunks", [1, 2])
@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_top1_chunk_attends_to_its_own_and_the_selected_chunks(x: Tensor, selection: str, remote_chunks: int) -> None:
    mixer = build(Top1Chunk, position="none", chunk_size=4, selection=selection, remote_chunks=remote_chunks)
    q, k, v = (torch.nn.functional.normalize(t, dim=-1) if i < 2 else t for i, t in enumerate(projected(mixer, x)))
    scores = q @ k.mT * math.sqrt(8)
    o = torch.empty_like(v)
    for b, h, i in ((b, h, i) for b in range(2) for h in range(4) for i in range(21)):
        own = i // 4
        seen = list(range(4 * own, i + 1))
        if own:
            chunks = [range(4 * c, 4 * c + 4) for c in range(own)]
            masses = [scores[b, h, i, chunk].exp().sum() for chunk in chunks]
            means = [q[b, h, i] @ k[b, h, chunk].mean(0) for chunk in chunks]
            best = torch.stack(masses if selection == "exact" else means).argsort(descending=True)[:remote_chunks]
            seen += [j for c in best for j in chunks[int(c)]]
        o[b, h, i] = scores[b, h, i, seen].softmax(-1) @ v[b, h, seen]
    torch.testing.assert_close(mixer(x), output(mixer, o), rtol=1e-5, atol=1e-6)


def test_the_whole_sequence_in_one_chunk_is_softmax_attention(x: Tensor) -> None:
    chunk, softmax = build(Top1Chunk, chunk_size=32), build(Attention, qk_norm=True)
    softmax.load_state_dict(chunk.state_dict())
    torch.testing.assert_close(chunk(x), softmax(x))


def test_costs_count_the_causal_half() -> None:
    mixer = Attention(64, 0, 2, n_heads=4)
    projections = 2 * 64 * (3 * 64 + 64)
    assert mixer.flops_per_token(7) == projections + 4 * 64 * (7 + 1) / 2
    assert mixer.flops_per_token(7, training=True) == 3 * mixer.flops_per_token(7)
    assert mixer.state_bytes(10, torch.bfloat16) == 10 * 2 * 64 * 2
    shared = Attention(64, 0, 2, n_heads=4, n_kv_heads=1)
    assert shared.state_bytes(10, torch.bfloat16) == 10 * 2 * 16 * 2


def test_window_costs_do_not_grow_beyond_the_window() -> None:
    mixer = Attention(64, 0, 2, n_heads=4, window=3)
    pairs = 1 + 2 + 3 + 3 + 3
    assert mixer.flops_per_token(5) == pytest.approx(2 * 64 * 256 + 4 * 64 * pairs / 5)
    assert mixer.state_bytes(1000) == mixer.state_bytes(3) == 3 * 2 * 64 * 2


@pytest.mark.parametrize("length", [3, 4, 8, 23])
@pytest.mark.parametrize("remote_chunks", [1, 3, 9])
@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_top1_chunk_costs_count_each_query(selection: Selection, remote_chunks: int, length: int) -> None:
    mixer = Top1Chunk(64, 0, 2, n_heads=4, chunk_size=4, selection=selection, remote_chunks=remote_chunks)
    attended = selected = 0
    for i in range(length):
        own = i // 4
        attended += i - 4 * own + 1 + 4 * min(own, remote_chunks)
        selected += own * (4 if selection == "exact" else 1)
    projections = 2 * 64 * 256
    assert mixer.flops_per_token(length) == pytest.approx(projections + 64 * (4 * attended + 2 * selected) / length)
    training = mixer.flops_per_token(length, training=True)
    assert training == pytest.approx(3 * projections + 64 * (12 * attended + 2 * selected) / length)


def test_top1_element_has_no_product_with_the_values() -> None:
    mixer = Top1Element(64, 0, 2, n_heads=4)
    assert mixer.flops_per_token(9) == 2 * 64 * 256 + 2 * 64 * 5
    assert mixer.flops_per_token(9, training=True) == 3 * 2 * 64 * 256 + 8 * 64 * 5


REFUSED = [
    (Attention, {"n_heads": 5}, "n_heads=5 does not divide d_model=32"),
    (Attention, {"n_heads": 0}, "n_heads"),
    (Attention, {"n_heads": 4, "n_kv_heads": 3}, "n_kv_heads=3 does not divide n_heads=4"),
    (Attention, {"n_heads": 4, "head_dim": 7}, "even head_dim"),
    (Attention, {"n_heads": 4, "position": "absolute"}, "position must be"),
    (Attention, {"n_heads": 4, "rope_base": 0}, "rope_base"),
    (Attention, {"n_heads": 4, "rope_base": math.nan}, "rope_base must be above 1, and finite, not nan"),
    (Attention, {"n_heads": 4, "window": 0}, "window"),
    (Attention, {"n_heads": 4, "position": partial(ScaledRoPE, factor=0.5)}, "factor must be at least 1, not 0.5"),
    (Attention, {"n_heads": 4, "temperature": 0.0}, "temperature"),
    (Attention, {"n_heads": 4, "relation": "constant"}, "relation must be"),
    (Attention, {"n_heads": 4, "relation": "constant_keys"}, "with max_length=None: constants need it"),
    (Attention, {"n_heads": 4, "max_length": 8}, "max_length"),
    (Top1Element, {"n_heads": 4, "position": "alibi"}, "position must be rope or none, not alibi"),
    (Top1Chunk, {"n_heads": 4, "position": "alibi"}, "position must be rope or none, not alibi"),
    (Top1Chunk, {"n_heads": 4, "chunk_size": 0}, "chunk_size"),
    (Top1Chunk, {"n_heads": 4, "selection": "best"}, "selection must be exact or approx, not best"),
    (Top1Chunk, {"n_heads": 4, "remote_chunks": 0}, "remote_chunks must be at least 1, not 0"),
    (Top1Chunk, {"n_heads": 4, "remote_chunks": -2}, "remote_chunks must be"),
    (Top1Chunk, {"n_heads": 4, "remote_chunks": True}, "remote_chunks must be"),
]


@pytest.mark.parametrize(("mixer", "options", "words"), REFUSED)
def test_options_that_make_no_sense_are_refused(mixer: type, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        mixer(32, 0, 2, **options)


def test_positions_without_constants_are_refused(x: Tensor) -> None:
    mixer = build(Attention, relation="constant_keys", max_length=20)
    with pytest.raises(UserError, match="constants end at 20"):
        mixer(x)


@pytest.mark.parametrize("mixer", [Attention, Top1Element, Top1Chunk])
def test_borders_of_two_dimensions_are_refused(mixer: type, x: Tensor) -> None:
    borders = torch.tensor([[0, 10, x.shape[1]]], dtype=torch.int32)
    for position in ("rope", "none"):
        with pytest.raises(UserError, match=r"cu_seqlens must be int32 \[N \+ 1\], not torch.int32 \[1, 3\]"):
            mixer(x.shape[2], 0, 2, n_heads=4, position=position).double()(x[:1], cu_seqlens=borders)


def test_ops_know_that_a_compiled_graph_was_left_for_them(monkeypatch) -> None:
    """Attention to a growing state leaves the graph, and FlashAttention-4 serves compiled passes only."""
    mixer, seen = Attention(32, 0, 1, n_heads=4), []
    core = type(mixer.attend.core)
    forward = core.forward
    monkeypatch.setattr(core, "forward", lambda *args, **options: seen.append(LEFT.get()) or forward(*args, **options))
    x = torch.randn(1, 8, 32)
    with torch.no_grad():
        for run in (mixer, torch.compile(mixer, backend="eager"), mixer):
            run(x, state=mixer.init_state(1, 8, "cpu", torch.float32))
    assert seen == [False, True, False]
