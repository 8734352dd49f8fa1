import copy
import dataclasses
import math

import pytest
import torch

from seqarch.errors import UserError
from seqarch.mixers.attention import Attention, Top1Chunk
from seqarch.mixers.base import Mixer
from seqarch.mixers.canon import Canon
from seqarch.mixers.delta_net import GatedDeltaNet
from seqarch.mixers.mamba2 import Mamba2
from seqarch.mixers.rwkv7 import RWKV7, RWKV7Shell
from seqarch.mixers.rwkv56 import RWKV6
from seqarch.model import GELUMLP, FeedForward, GeGLU, RWKVChannelMix, RWKVGatedChannelMix, SequenceLM, SwiGLU, generate
from seqarch.model.lm import embedding_std

V, D_MODEL = 61, 32


def attention(d_model, layer_idx, n_layers):
    return Attention(d_model, layer_idx, n_layers, n_heads=4)


def select(d_model, layer_idx, n_layers):
    return Top1Chunk(d_model, layer_idx, n_layers, n_heads=4, chunk_size=4)


def shell(d_model, layer_idx, n_layers):
    return RWKV7Shell(d_model, layer_idx, n_layers, n_heads=4)


def build(**options):
    defaults = {"mixers": {"attention": attention}, "feed_forward": GeGLU, "n_layers": 2}
    torch.manual_seed(0)
    lm = SequenceLM(V, D_MODEL, **{**defaults, **options})
    for parameter in lm.parameters():  # layers that start at zero would hide their computation
        torch.nn.init.normal_(parameter, std=0.1) if not parameter.abs().max() else None
    return lm


def test_loops_repeat_the_blocks_with_one_set_of_weights():
    once, thrice = build(mixers={"shell": shell}), build(mixers={"shell": shell}, loops=3)
    assert once.state_dict().keys() == thrice.state_dict().keys()
    thrice.load_state_dict(once.state_dict())
    tokens = torch.randint(0, V, (2, 9))
    x = once.embedding(tokens)
    for _ in range(3):
        carry = {}
        for block in once.blocks:
            x, carry = block(x, carry)
    torch.testing.assert_close(thrice(tokens), once.head(once.norm(x)))
    head = 2.0 * D_MODEL * V
    assert thrice.flops_per_token(9) - head == 3 * (once.flops_per_token(9) - head)
    exact = copy.deepcopy(thrice).double()  # a step sums in another order, which differs only by float64's rounding
    state = exact.init_state(2, 9, "cpu", torch.float64)
    decoded = torch.cat([exact(tokens[:, t : t + 1], state=state) for t in range(9)], dim=1)
    torch.testing.assert_close(decoded, exact(tokens), rtol=1e-12, atol=1e-12)
    state = thrice.init_state(2, 9, "cpu", torch.float32)
    assert thrice.state_bytes(9, torch.float32) == 3 * once.state_bytes(9, torch.float32)
    assert sum(tensor.nbytes for tensor in state.tensors()) == 2 * thrice.state_bytes(9, torch.float32)


MODELS = {
    "transformer": {"feed_forward": GELUMLP, "norm": "layernorm", "learned_positions": 64},
    "untied": {"tie_embeddings": False, "feed_forward": SwiGLU},
    "hybrid": {"mixers": {"a": attention, "b": select}, "pattern": ["a", "b"], "n_layers": 4},
    "rwkv7": {
        "mixers": {"shell": shell},
        "feed_forward": RWKVChannelMix,
        "embedding_norm": True,
        "norm": "layernorm",
        "tie_embeddings": False,
    },
    "rwkv6": {
        "mixers": {"time_mix": lambda *place: RWKV6(*place, n_heads=4)},
        "feed_forward": RWKVGatedChannelMix,
        "embedding_norm": True,
        "norm": "layernorm",
    },
    "hybrid of two recurrences and attention": {
        "mixers": {
            "mamba": lambda *place: Mamba2(*place, d_state=8, head_dim=16),
            "rwkv": lambda *place: RWKV7(*place, n_heads=4),
            "attention": attention,
        },
        "pattern": ["mamba", "rwkv", "attention"],
        "n_layers": 6,
    },
    "hybrid of a recurrence and selection": {
        "mixers": {"delta": lambda *place: GatedDeltaNet(*place, n_heads=2, head_dim=16), "select": select},
        "pattern": ["delta", "select"],
        "n_layers": 4,
    },
    "no feed-forward": {"feed_forward": None},
    "canon": {"canon": Canon()},
    "canon in a hybrid": {
        "mixers": {"delta": lambda *place: GatedDeltaNet(*place, n_heads=2, head_dim=16, conv=False), "select": select},
        "pattern": ["delta", "select"],
        "feed_forward": GELUMLP,
        "canon": Canon("BD", conv_size=3, residual=False, activation="silu"),
    },
    "canon around rwkv7": {"mixers": {"shell": shell}, "feed_forward": RWKVChannelMix, "canon": Canon("AC")},
    "canon in mamba2": {
        "mixers": {"mamba": lambda *place: Mamba2(*place, d_state=8, head_dim=16, conv=False)},
        "feed_forward": None,
        "canon": Canon("AB"),
    },
    "separate": {"mixers": {"a": attention}, "pattern": ["a", "none"], "no_feed_forward": ["a"]},
}


@pytest.fixture(params=MODELS)
def lm(request):
    return build(**MODELS[request.param])


def tokens(batch=2, length=21):
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(1))


def test_loss_is_the_cross_entropy_of_the_logits(lm):
    x = tokens()
    expected = torch.nn.functional.cross_entropy(lm(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    torch.testing.assert_close(lm(x[:, :-1], x[:, 1:]), expected)
    per_token = lm(x[:, :-1], x[:, 1:], reduction="none")
    assert per_token.shape == (2, 20)
    torch.testing.assert_close(per_token.mean(), expected)


def test_state_continues_the_sequence(lm):
    x = tokens()
    state = lm.init_state(2, 21, "cpu", torch.float32)
    pieces = [lm(piece, state=state) for piece in x.split([1, 7, 13], dim=1)]
    assert state.length == 21
    torch.testing.assert_close(torch.cat(pieces, dim=1), lm(x), rtol=1e-4, atol=1e-5)
    assert lm.state_bytes(21, torch.float32) * 2 == sum(t.numel() * t.element_size() for t in state.tensors())


def test_packed_documents_do_not_see_each_other(lm):
    x = tokens(1, 21)
    borders = torch.tensor([0, 5, 18, 21], dtype=torch.int32)
    apart = [lm(x[:, a:b]) for a, b in ((0, 5), (5, 18), (18, 21))]
    torch.testing.assert_close(lm(x, cu_seqlens=borders), torch.cat(apart, dim=1), rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_changes_nothing(lm):
    x = tokens()
    lm(x[:, :-1], x[:, 1:]).backward()
    expected = [parameter.grad.clone() for parameter in lm.parameters() if parameter.grad is not None]
    lm.zero_grad()
    lm.checkpoint_activations()
    lm(x[:, :-1], x[:, 1:]).backward()
    for parameter, gradient in zip(lm.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_compiled_and_checkpointed_blocks_hand_on_the_carry():
    lm = build(mixers={"shell": shell}, feed_forward=None)  # the first hands its values to the second
    x = tokens(length=7)
    lm(x[:, :-1], x[:, 1:]).backward()
    expected = [parameter.grad.clone() for parameter in lm.parameters() if parameter.grad is not None]
    lm.zero_grad()
    lm.checkpoint_activations()
    torch.compiler.reset()
    for block in lm.blocks:
        block.compile(backend="eager", fullgraph=True)
    lm(x[:, :-1], x[:, 1:]).backward()
    for parameter, gradient in zip(lm.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_every_parameter_is_used_where_the_value_residual_begins_in_a_later_layer():
    mixers = {"attention": attention, "shell": shell}
    lm = build(mixers=mixers, pattern=["attention", "shell"], n_layers=4)
    x = tokens()
    lm(x[:, :-1], x[:, 1:]).backward()
    assert [name for name, parameter in lm.named_parameters() if parameter.grad is None] == []
    shells = [module for module in lm.modules() if isinstance(module, RWKV7Shell)]
    assert [each.value_gate is not None for each in shells] == [False, True]


def test_last_only_is_the_last_position(lm):
    torch.testing.assert_close(lm(tokens(), last_only=True), lm(tokens())[:, -1:])


def test_initial_loss_is_that_of_a_uniform_guess():
    x = tokens(8, 64)
    assert abs(float(build()(x[:, :-1], x[:, 1:])) - torch.log(torch.tensor(float(V)))) < 0.1


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_rwkv_starts_at_a_uniform_guess(tie_embeddings):
    """Its blocks start at zero. A tied head must not predict that each token repeats."""
    lm = SequenceLM(
        256,
        512,
        2,
        {"time_mix": lambda *place: RWKV6(*place, n_heads=8)},
        feed_forward=RWKVGatedChannelMix,
        norm="layernorm",
        embedding_norm=True,
        tie_embeddings=tie_embeddings,
    )
    x = torch.randint(256, (4, 64))
    assert float(lm(x[:, :-1], x[:, 1:])) == pytest.approx(math.log(256), abs=0.2)


def test_the_embedding_is_that_of_the_seed_up_to_scale():
    drawn = []
    for embedding_norm in (False, True):
        torch.manual_seed(0)
        drawn.append(build(embedding_norm=embedding_norm, tie_embeddings=False).embedding.weight)
    torch.testing.assert_close(drawn[0] / drawn[0].std(), drawn[1] / drawn[1].std())


def test_a_normalised_embedding_is_drawn_smaller():
    assert build(embedding_norm=False).embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)
    untied = build(embedding_norm=True, tie_embeddings=False)
    assert untied.embedding.weight.std().item() == pytest.approx(1e-4 / 3**0.5, rel=0.1)
    assert embedding_std(32000, 768, normalised=True, tied=True) == pytest.approx(0.00675, rel=0.01)
    assert embedding_std(32000, 64, normalised=True, tied=True) == 0.02


def test_rwkv7s_channel_mix_starts_from_the_published_values():
    layer = RWKVChannelMix(48, 1, 4)
    torch.testing.assert_close(layer.mix, 1 - (torch.arange(48) / 48) ** (0.75**4))
    torch.testing.assert_close(layer.key.weight.T @ layer.key.weight, torch.eye(48), atol=1e-5, rtol=0)
    assert not layer.value.weight.any()


def test_tied_weights_count_once():
    assert build().n_parameters() + V * D_MODEL == build(tie_embeddings=False).n_parameters()


def test_flops_are_those_of_the_matrices():
    lm = build()
    matrices = sum(p.numel() for p in lm.parameters() if p.ndim == 2)  # the tied embedding is the head's matrix
    scores_and_values = 2 * 2 * 2 * D_MODEL * (64 + 1) / 2  # 2 layers, 2 products, mean of 1..64 keys
    assert lm.flops_per_token(64) == pytest.approx(2 * matrices + scores_and_values)
    assert lm.flops_per_token(64, training=True) == pytest.approx(3 * lm.flops_per_token(64))


def test_greedy_generation_is_the_argmax_of_the_whole_sequence(lm):
    prompt = tokens(2, 9)
    drawn = torch.stack(generate(lm, prompt, 12, temperature=0))
    assert drawn.shape == (2, 12)
    whole = lm(torch.cat((prompt, drawn[:, :-1]), dim=1))
    assert torch.equal(drawn, whole[:, 8:].argmax(dim=-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixers": {}}, "give a pattern: there are 0 mixers"),
        ({"mixers": {"a": attention, "b": select}}, "give a pattern"),
        ({"pattern": ["atention"]}, "did you mean attention?"),
        ({"n_layers": 3, "pattern": ["attention", "attention"]}, "layers of pattern=2 does not divide n_layers=3"),
        ({"mixers": {"a": attention, "b": select}, "pattern": ["a"]}, "has b, which the pattern does not use"),
        ({"no_feed_forward": ["x"]}, "no_feed_forward 'x'"),
        ({"pattern": ["attention", "none"], "feed_forward": None}, "needs a mixer or a feed-forward"),
        ({"mixers": {"none": attention}}, "give it another name"),
        ({"n_layers": 0}, "n_layers must be at least 1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        build(**options)


def test_learned_positions_end():
    with pytest.raises(UserError, match="learned_positions is 8"):
        build(learned_positions=8)(tokens(1, 9))


@pytest.mark.parametrize(
    ("kind", "matrices"), [(GELUMLP, 8), (GeGLU, 8.06), (SwiGLU, 8.06), (RWKVChannelMix, 8), (RWKVGatedChannelMix, 8)]
)
def test_feed_forward_sizes(kind, matrices):
    layer = kind(768, 0, 12)
    assert layer.flops_per_token() == pytest.approx(2 * matrices * 768 * 768, rel=0.01)


def test_gated_channel_mix_is_that_of_rwkv_5_and_6():
    """RWKV_CMix_x052 of github.com/BlinkDL/RWKV-LM, RWKV-v5/src/model.py; its time_mix is one minus our mix."""
    layer = RWKVGatedChannelMix(768, 3, 12)
    assert layer.key.out_features == 2688
    time_mix = (torch.arange(768) / 768) ** 0.75
    for mix in (layer.key_mix, layer.receptance_mix):
        torch.testing.assert_close(1 - mix, time_mix)
    torch.testing.assert_close(layer.key.weight.T @ layer.key.weight, torch.eye(768), atol=1e-4, rtol=0)
    assert not layer.value.weight.any()
    assert not layer.receptance.weight.any()
    torch.nn.init.normal_(layer.value.weight, std=0.02)
    torch.nn.init.normal_(layer.receptance.weight, std=0.02)
    x = torch.randn(2, 5, 768)
    xx = torch.nn.functional.pad(x, (0, 0, 1, -1))
    mixed = x * time_mix + xx * (1 - time_mix)
    kv = layer.value(torch.relu(layer.key(mixed)) ** 2)
    torch.testing.assert_close(layer(x), torch.sigmoid(layer.receptance(mixed)) * kv, rtol=1e-4, atol=1e-5)


def test_feed_forward_is_a_contract():
    with pytest.raises(TypeError, match=r"abstract class FeedForward .*forward.*, .*reset_parameters"):
        FeedForward(8, 0, 1)  # pyright: ignore[reportAbstractUsage]


def test_state_is_a_dataclass():
    assert dataclasses.is_dataclass(build().init_state(1, 4, "cpu", torch.float32))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norms_keep_half_precision_under_autocast(norm):
    """LayerNorm returns float32 there, which doubles the memory traffic of all later operations."""
    lm = build(norm=norm, feed_forward=SwiGLU)
    seen = []
    for block in lm._blocks():
        for part in (block.mixer, block.feed_forward):
            assert part is not None
            part.register_forward_pre_hook(lambda part, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        lm(torch.zeros(1, 5, dtype=torch.long))
    assert seen == [torch.bfloat16] * 4


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_residual_stream_in_float32_has_branches_in_autocasts_dtype(norm):
    lm = build(norm=norm, feed_forward=SwiGLU, residual_in_fp32=True)
    stream, branches = [], []
    for block in lm._blocks():
        block.register_forward_pre_hook(lambda block, args: stream.append(args[0].dtype))
        for part in (block.mixer, block.feed_forward):
            assert part is not None
            part.register_forward_pre_hook(lambda part, args: branches.append(args[0].dtype))
    tokens = torch.zeros(1, 5, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        loss = lm(tokens, tokens)
    assert (stream, branches) == ([torch.float32] * 2, [torch.bfloat16] * 4)
    loss.backward()
    assert lm.embedding.weight.grad is not None


@pytest.mark.parametrize(("scaled", "std"), [(True, 0.02 / 4), (False, 0.02)])
def test_projections_to_the_residual_stream_may_start_unscaled(scaled, std):
    torch.manual_seed(0)
    parts = [
        Attention(256, 0, 8, n_heads=4, scaled_output=scaled).out,
        *(kind(256, 0, 8, scaled_output=scaled).down for kind in (GELUMLP, SwiGLU)),
    ]
    assert [part.weight.std().item() for part in parts] == pytest.approx([std] * 3, rel=0.02)


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (lambda x: x[:, :1], r"\(2, 1, 32\)"),  # a sum would broadcast these two in silence
        (lambda x: x[..., :1], r"\(2, 9, 1\)"),
        (lambda x: x[..., :16], r"\(2, 9, 16\)"),
        (lambda x: (x, None), "tuple"),
        (lambda x: None, "NoneType"),
        (lambda x: x.double(), r"\(2, 9, 32\) in torch.float64"),
    ],
)
@pytest.mark.parametrize("part", ["Layer", "GeGLU"])
def test_a_layer_that_gives_another_shape_or_a_wider_dtype_is_refused(output, what, part, monkeypatch):
    class Layer(Mixer):
        def forward(self, x):
            return x if part == "GeGLU" else output(x)

    if part == "GeGLU":
        monkeypatch.setattr(GeGLU, "forward", lambda self, x, **options: output(x))
    lm = build(mixers={"layer": Layer})
    with pytest.raises(UserError, match=rf"{part} returned {what}.*, not a tensor of its input's shape \(2, 9, 32\)"):
        lm(torch.randint(0, V, (2, 9)))


def test_a_layer_may_give_float32_under_autocast_only():
    class Layer(Mixer):
        def forward(self, x):
            return x.float()

    lm = build(mixers={"layer": Layer})
    tokens = torch.randint(0, V, (2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        assert lm(tokens).dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"Layer returned \(2, 9, 32\) in torch.float32, not .* in torch.bfloat16"):
        lm.bfloat16()(tokens)
