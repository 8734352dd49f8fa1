"""Generation: for every mixer, static steps, prompts in pieces and ragged prompts equal ordinary generation."""

import dataclasses
import functools
import inspect
from pathlib import Path
from typing import ClassVar, cast

import pytest
import torch
import yaml

from seqarch.errors import UserError
from seqarch.mixers.base import Clock, MixerState
from seqarch.mixers.cores import KeyValueState
from seqarch.mixers.registry import load_mixer, mixer_entries
from seqarch.model import Decoder, GeGLU, RWKVChannelMix, SequenceLM, generate, with_bf16_weights
from seqarch.model.decoder import ACTIVATIONS, Sampling, StaticStep, _read_block, is_static

ON_GPU = torch.cuda.is_available()
V, D_MODEL, CHUNK = (40, 128, 16) if ON_GPU else (40, 32, 4)  # the kernels take chunks of at least 16 keys


def of(name, **options):
    mixer = load_mixer(name)
    heads = {"n_heads": 2} if "n_heads" in inspect.signature(mixer).parameters else {}
    return functools.partial(mixer, **heads, **options)


BUILT_IN = [entry.name for entry in mixer_entries() if entry.package == "seqarch"]
MIXERS = {
    **{name: of(name) for name in BUILT_IN},
    "Attention": of("Attention", n_kv_heads=1),
    "Attention, ALiBi": of("Attention", position="alibi"),
    "Attention, window": of("Attention", window=5),
    "Attention, window, ALiBi": of("Attention", window=5, position="alibi"),
    "Attention, constants": of("Attention", relation="constant_queries_keys", max_length=128),
    "Top1Chunk": of("Top1Chunk", chunk_size=CHUNK),
    "Top1Chunk, approx": of("Top1Chunk", chunk_size=CHUNK, selection="approx"),
    "Top1Chunk, two": of("Top1Chunk", chunk_size=CHUNK, remote_chunks=2),
    "Top1Chunk, approx, three": of("Top1Chunk", chunk_size=CHUNK, selection="approx", remote_chunks=3),
    "Mamba2": of("Mamba2", head_dim=16, d_state=8),
    "TaylorLinearAttention": of("TaylorLinearAttention", feature_dim=4),
    "Based": of("Based", window=4, feature_dim=4),
}


def pattern(recipe):
    """The mixers' classes in the pattern of a recipe."""
    model = yaml.safe_load(recipe.read_text())["model"]
    return [model["mixers"][name]["class_path"] for name in model["pattern"]]


PATTERNS = {
    "hybrid": ["Mamba2", "Attention, window", "none", "Top1Chunk, approx", "RWKV7", "Attention"],
    "all mixers": BUILT_IN,
    **{path.stem: pattern(path) for path in sorted(Path(__file__).parents[2].glob("recipes/hybrid_*.yaml"))},
}


COMPOSED = ("hybrid", "all mixers")
"""Patterns that have each kind of state."""


def build(name="Attention", *, dtype=torch.float64, **options):
    names = PATTERNS.get(name, [name])
    torch.manual_seed(0)
    lm = SequenceLM(
        vocab_size=V,
        d_model=D_MODEL,
        n_layers=5 if name == "Based" else max(2, len(names)),
        mixers={each: MIXERS[each] for each in names if each != "none"},
        pattern=names,
        feed_forward=RWKVChannelMix if name.startswith("RWKV") else GeGLU,
        **options,
    ).to(dtype)
    for parameter in lm.parameters():  # away from the zeros with which some mixers begin
        torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim == 2 else parameter.data.add_(0.1)
    return lm.eval()


def tokens(*shape, seed=1):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [*MIXERS, *PATTERNS])
@torch.no_grad()
def test_static_steps_are_ordinary_steps(name):
    """Equal up to float64's rounding. States stay in their buffers and nothing is read on the host."""
    lm, x = build(name, learned_positions=64), tokens(3, 20)
    wanted = lm(x)[:, 10:]
    state = lm.init_state(3, 21, "cpu", torch.float64)
    lm(x[:, :10], state=state)
    assert is_static(lm)
    assert state.pin(Clock.at(10, 3, "cpu"))
    places = [tensor.data_ptr() for tensor in state.tensors()]
    found = torch.cat([lm(x[:, t : t + 1], state=state) for t in range(10, 20)], dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert [tensor.data_ptr() for tensor in state.tensors()] == places
    assert state.length == 10


def test_a_compiled_model_generates_as_the_model_does():
    lm, prompts = build(), [tokens(5)]
    compiled = cast(SequenceLM, torch.compile(lm, backend="eager"))
    assert torch.equal(*(generate(each, prompts, 2, temperature=0)[0] for each in (lm, compiled)))


@pytest.mark.parametrize("name", [*MIXERS, *PATTERNS])
def test_ragged_prompts_in_pieces_are_one_by_one(name):
    """Each token is the argmax of one pass over the prompt and all tokens before it."""
    _assert_greedy(build(name), prefill_chunk=4, batch_size=2)


def test_ragged_prompts_in_one_batch_are_one_by_one():
    _assert_greedy(build("all mixers"), prefill_chunk=100, batch_size=3)


def _assert_greedy(lm, **options):
    prompts = [tokens(length, seed=length) for length in (11, 3, 6)]
    found = generate(lm, prompts, 3, temperature=0, **options)
    for prompt, drawn in zip(prompts, found, strict=True):
        assert len(drawn) == 3
        with torch.no_grad():
            wanted = lm(torch.cat((prompt, drawn))[None, :-1])[0, len(prompt) - 1 :].argmax(dim=-1)
        assert torch.equal(drawn, wanted)


@pytest.mark.parametrize("name", COMPOSED)
@torch.no_grad()
def test_pieces_are_one_pass(name):
    """`MixerSuite` compares pieces for every mixer and option."""
    lm, x = build(name), tokens(2, 23)
    whole, pieces = (Decoder(lm, prefill_chunk=chunk).prefill(x, 24) for chunk in (100, 5))
    last = tokens(2, 1)
    torch.testing.assert_close(lm(last, state=whole), lm(last, state=pieces), rtol=1e-12, atol=1e-12)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ["RWKV7", "Top1Chunk"])  # a state of one size with a carry, and a cache
@torch.no_grad()
def test_compiled_passes_are_passes(name):
    """Whole passes are compiled by the second, whatever the length of the state; the shorter last pass is not."""
    lm, x, graphs = build(name), tokens(2, 71), []

    def read_block(*args, **options):
        state = compiled(*args, **options)
        after.append(len(graphs))
        return state

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    after: list[int] = []
    torch.compiler.reset()
    plain, decoder = Decoder(lm, prefill_chunk=16), Decoder(lm, prefill_chunk=16, compiled=True)
    compiled, decoder.read_block = torch.compile(_read_block, backend=keep), read_block
    wanted, found = plain.prefill(x, 72), decoder.prefill(x, 72)
    last = tokens(2, 1)
    assert torch.equal(lm(last, state=found), lm(last, state=wanted))
    assert len(after) == 5 * len(lm.blocks), "71 tokens are five passes of 14 and one of one"
    assert 0 < after[2 * len(lm.blocks) - 1] == after[-1]
    torch.compiler.reset()


@pytest.mark.parametrize(("length", "size"), [(51199, 3936), (4096, 4096), (4097, 2048), (40, 40), (4095 * 4, 4080)])
def test_passes_have_one_length_in_whole_tiles_and_leave_few_tokens(length, size):
    assert Decoder(build())._pass(16, length) == size


def test_stop_ends_each_sequence_by_itself():
    lm, prompts = build(), [tokens(5), tokens(7, seed=3)]
    free = generate(lm, prompts, 12, temperature=0)
    stop = int(free[0][3])
    first = (free[0] == stop).nonzero()[0, 0]
    found = generate(lm, prompts, 12, temperature=0, stop={stop})
    assert torch.equal(found[0], free[0][: first + 1])
    assert [
        len(each) for each in generate(lm, prompts, 12, temperature=0, stop=lambda row, new: len(new) == 4 + row)
    ] == [4, 5]


def test_draws_follow_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    noise = torch.empty(4000, 4).exponential_(generator=torch.Generator().manual_seed(0))

    def shares(**options):
        drawn = Sampling(**options).draw(logits.expand(4000, -1), noise)
        return torch.bincount(drawn, minlength=4) / 4000

    torch.testing.assert_close(shares(), logits[0].softmax(0), atol=0.03, rtol=0)
    torch.testing.assert_close(shares(temperature=2), (logits[0] / 2).softmax(0), atol=0.03, rtol=0)
    torch.testing.assert_close(shares(top_k=2)[:2], logits[0, :2].softmax(0), atol=0.03, rtol=0)
    assert not shares(top_k=2)[2:].any()
    assert shares(top_p=0.8).count_nonzero() == 2  # 0.64, then 0.88
    assert shares(top_p=0.6).count_nonzero() == 1
    assert shares(top_p=1).count_nonzero() == 4


def test_seed_decides():
    lm, prompts = build(), [tokens(5), tokens(7, seed=3)]
    first, again, other = (
        generate(lm, prompts, 12, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def test_a_state_that_grows_steps_in_the_ordinary_way(monkeypatch):
    lm = build()
    wanted = generate(lm, tokens(1, 4), 6, temperature=0)
    monkeypatch.setattr(KeyValueState, "pin", lambda self, clock: False)
    assert torch.equal(generate(lm, tokens(1, 4), 6, temperature=0)[0], wanted[0])
    step = StaticStep(Decoder(lm, capture=True), lm.init_state(1, 40, "cpu", torch.float64), tokens(1, 40), 0)
    assert not step.static
    assert step.stream is None


def test_a_state_that_counts_in_python_serves_no_static_steps():
    @dataclasses.dataclass
    class Mean(MixerState):
        total: torch.Tensor
        seen: int = 0
        static: ClassVar[bool] = True

    assert not Mean(torch.zeros(1)).pin(Clock.at(0, 1, torch.device("cpu")))


def test_a_batch_that_cannot_fit_is_refused_with_the_one_that_fits(monkeypatch):
    lm = build()
    state = lm.state_bytes(25, torch.float64)
    passes = 25 * ACTIVATIONS * D_MODEL * 8
    monkeypatch.setattr("seqarch.model.decoder.free_memory", lambda device: int(2.5 * (state + passes)))
    assert len(generate(lm, tokens(5, 5), 20, batch_size=2)) == 5
    with pytest.raises(UserError, match=r"5 sequences of 25 tokens do not fit .* batch_size 2 fits$"):
        generate(lm, tokens(5, 5), 20)
    monkeypatch.setattr("seqarch.model.decoder.free_memory", lambda device: 10)
    with pytest.raises(UserError, match=r"do not fit in memory \(a state takes .* are free\): give shorter prompts"):
        generate(lm, tokens(5, 5), 20)


def test_bf16_weights_compute_what_autocast_does():
    lm, x = build(dtype=torch.float32), tokens(2, 9)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = lm(x)
        assert torch.equal(with_bf16_weights(lm)(x), wanted)
    assert lm.head.weight.dtype == torch.bfloat16
    assert lm.embedding.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1}, "temperature must be 0"),
        ({"temperature": 1e-45}, "temperature must be 0 .* at least 0.0001"),
        ({"temperature": 0, "top_k": 2}, "top_k has no effect at temperature 0"),
        ({"temperature": 0, "top_p": 0.9}, "top_p has no effect at temperature 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p must lie in 0..1, 0 excluded"),
        ({"top_p": 1.5}, "top_p must lie in 0..1, 0 excluded"),
        ({"prompts": torch.empty(1, 0)}, "token ids in 0..39, at least one"),
        ({"prompts": []}, "token ids in 0..39, at least one"),
        ({"prompts": [tokens(2), torch.tensor([1, 2, -1, 3])]}, "token ids in 0..39, at least one"),  # -1: to be drawn
        ({"prompts": [torch.tensor([V])]}, "token ids"),
        ({"prompts": tokens(3)}, "1-D tensor of token ids"),  # as three prompts of one token
        ({"prompts": [tokens(2, 3)]}, "1-D tensor of token ids"),
        ({"prompts": [tokens(3) + 0.5]}, "1-D tensor of token ids"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1"),
    ],
)
def test_wrong_generation_is_refused(arguments, message):
    given = {"prompts": tokens(1, 3), "max_new_tokens": 4, **arguments}
    with pytest.raises(UserError, match=message):
        generate(build(), **given)
