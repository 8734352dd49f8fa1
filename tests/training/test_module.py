import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from seqarch.errors import UserError
from seqarch.mixers.attention import Attention
from seqarch.model import GELUMLP
from seqarch.model.roles import is_decayed
from seqarch.training import LanguageModel
from seqarch.training.callbacks.attention_entropy import layer_entropy
from seqarch.training.schedule import decay_start, warmup_and_decay


def module(**options):
    model = {"vocab_size": 31, "d_model": 16, "n_layers": 2, "feed_forward": GELUMLP}
    model["mixers"] = {"attention": lambda d, i, n: Attention(d, i, n, n_heads=2, bias=True)}
    built = LanguageModel(**{**model, **options})
    built.configure_model()
    return built


class Trainer:
    def __init__(self, max_steps=100, precision="32-true"):
        self.max_steps, self.precision = max_steps, precision


def optimizer_of(built, **trainer):
    built._trainer = None
    built.__class__ = type("Attached", (LanguageModel,), {"trainer": Trainer(**trainer)})
    return built.configure_optimizers()


def schedule(decay_share, warmup=4, steps=10):
    start = decay_start(warmup, steps, decay_share)
    return [warmup_and_decay(step, warmup, start, steps) for step in range(steps + 1)]


def test_schedule_rises_and_falls_linearly():
    shares = schedule(None)
    assert shares[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert shares[4] == 1.0
    assert shares[4:] == pytest.approx([1 - step / 6 for step in range(7)])


@pytest.mark.parametrize(
    ("decay_share", "after_warmup"),
    [
        (0.3, [1, 1, 1, 1, 2 / 3, 1 / 3, 0]),
        (0.1, [1, 1, 1, 1, 1, 1, 0]),
        (0.0, [1, 1, 1, 1, 1, 1, 0]),
        (1.0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
    ],
)
def test_rate_is_constant_until_it_falls(decay_share, after_warmup):
    """Of ten steps, four of them warm-up; the step after the last is never taken."""
    assert schedule(decay_share)[4:] == pytest.approx(after_warmup)


def test_optimizer_follows_the_share_of_the_decay():
    built = optimizer_of(module(warmup_steps=2, decay_share=0.5, learning_rate=0.1), max_steps=8)
    rates = []
    for _ in range(8):
        rates.append(built["optimizer"].param_groups[0]["lr"])
        built["optimizer"].step()
        built["lr_scheduler"]["scheduler"].step()
    assert rates == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1, 0.075, 0.05, 0.025])


def test_weight_decay_is_for_matrices_alone():
    built = module(weight_decay=0.3)
    groups = optimizer_of(built)["optimizer"].param_groups
    decayed = {id(p) for p in groups[0]["params"]}
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    names = {name: id(p) in decayed for name, p in built.named_parameters()}
    assert all(decay == (not name.endswith(("bias", "norm.weight"))) for name, decay in names.items())
    assert any(names.values())
    assert not all(names.values())


def test_a_row_is_no_matrix():
    assert not is_decayed(torch.nn.Parameter(torch.ones(1, 1, 8)))
    assert is_decayed(torch.nn.Parameter(torch.ones(1, 2, 8)))


def test_constants_that_stand_for_activations_are_not_decayed():
    def constant(d, i, n):
        return Attention(d, i, n, n_heads=2, relation="constant_keys", position="none", max_length=9)

    groups = optimizer_of(module(mixers={"constant": constant}))["optimizer"].param_groups
    assert [p.ndim for p in groups[0]["params"]].count(3) == 0
    assert [p.ndim for p in groups[1]["params"]].count(3) == 2


@pytest.mark.parametrize(
    ("options", "trainer", "message"),
    [
        ({}, {"max_steps": -1}, "trainer.max_steps must be at least 1, not -1"),
        ({"warmup_steps": 100}, {}, r"model.warmup_steps \(below trainer.max_steps\) must lie in 0..99, not 100"),
        ({"decay_share": 1.5}, {}, "model.decay_share must lie in 0..1, not 1.5"),
        ({}, {"precision": "16-mixed"}, "use bf16-mixed"),
    ],
)
def test_wrong_training_options_are_named(options, trainer, message):
    with pytest.raises(UserError, match=message):
        optimizer_of(module(**options), **trainer)


def test_gradients_are_clipped_and_their_norm_kept():
    built = module()
    optimizer = torch.optim.SGD(built.parameters())
    built(torch.randint(31, (2, 9))).backward()
    before = torch.nn.utils.get_total_norm([p.grad for p in built.parameters() if p.grad is not None])
    built.configure_gradient_clipping(optimizer, gradient_clip_val=0.01)
    after = torch.nn.utils.get_total_norm([p.grad for p in built.parameters() if p.grad is not None])
    torch.testing.assert_close(built.gradient_norm, before)
    torch.testing.assert_close(after, torch.tensor(0.01), rtol=1e-3, atol=0)


def test_compiled_blocks_and_loss_compute_the_same(monkeypatch):
    """Without inductor, which takes ten seconds: `MixerSuite` compiles mixers with it."""
    graphs = []

    def compiled_by(wrapper, graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", compiled_by)
    torch.compiler.reset()
    plain = module(n_layers=1)
    compiled = module(n_layers=1, compile=True)
    compiled.load_state_dict(plain.state_dict())
    x = torch.randint(31, (2, 17))
    torch.testing.assert_close(compiled(x), plain(x))
    plain(x).backward()
    compiled(x).backward()
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    assert len(graphs) == 2, "a block and the loss"
    torch.compiler.reset()


def test_entropy_is_probed_uncompiled_and_the_blocks_stay_compiled():
    plain, compiled = module(), module(compile=True)
    compiled.load_state_dict(plain.state_dict())
    x = torch.randint(31, (2, 9))
    expected, found = layer_entropy(plain.lm, x), layer_entropy(compiled.lm, x)
    assert all(torch.equal(found[layer], heads) for layer, heads in expected.items())
    assert compiled.lm is not None
    assert all(block._compiled_call_impl is not None for block in compiled.lm.blocks)
