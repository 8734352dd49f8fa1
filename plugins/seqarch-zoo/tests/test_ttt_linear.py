"""TTTLinear keeps the contract and equals gradient descent as the paper writes it, by autograd and token by token."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from parameters import moved
from seqarch_zoo.ttt_linear import TTT_LINEAR, TTTLinear
from seqarch_zoo.ttt_linear import gradient as inner_gradient

from seqarch.errors import UserError
from seqarch.testing import MixerSuite


class TestTTTLinear(MixerSuite):
    mixer = TTTLinear
    options: ClassVar = [{"n_heads": 4, "mini_batch": 8}, {"n_heads": 2, "mini_batch": 5, "learning_rate": 0.5}]
    compile_options: ClassVar = {"backend": "aot_eager"}  # the recurrence itself is not compiled


def test_equals_gradient_descent():
    """Equations 4 to 7: each token's gradient by autograd at the model before its mini-batch."""
    torch.manual_seed(0)
    mixer = moved(TTTLinear(8, 0, 2, n_heads=1, mini_batch=4).double())
    q, k, v = torch.randn(3, 11, 8, dtype=torch.float64)
    rates = torch.rand(11, dtype=torch.float64)
    gain, shift = mixer.norm_weight[0, 0], mixer.norm_bias[0, 0]

    def norm(z):
        return F.layer_norm(z, (8,), gain, shift, 1e-6)

    W, b = mixer.weight[0].detach(), mixer.bias[0, 0].detach()
    outputs = []
    for t in range(11):
        place = t % 4
        decay = max(1 / (place + 1) + mixer.places[place].item(), 0)
        leaves = W.clone().requires_grad_(), b.clone().requires_grad_()
        seen = range(t - place, t + 1)
        loss: Any = sum(
            0.5 * rates[s] * (norm(k[s] @ leaves[0] + leaves[1]) - (v[s] - k[s])).square().sum() for s in seen
        )
        by_W, by_b = torch.autograd.grad(loss, leaves)
        now = W - decay * by_W, b - decay * by_b
        outputs.append(q[t] + norm(q[t] @ now[0] + now[1]))
        if place == 3:
            W, b = now
    q, k, v = (t[None, :, None] for t in (q, k, v))
    o = mixer._train(q, k, v, rates[None, :, None, None], mixer.init_state(1, 11, "cpu", torch.float64))
    torch.testing.assert_close(o[0, :, 0], torch.stack(outputs), rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_equals_the_authors_layer():
    """github.com/test-time-training/ttt-lm-pytorch, ttt.py, without a cache; pairs of channels lie as in seqarch."""
    torch.manual_seed(0)
    mixer = moved(TTTLinear(16, 0, 2, n_heads=2, mini_batch=4).double())
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in mixer.qkv(x).chunk(3, dim=-1))
    angles = torch.outer(torch.arange(12) % 4, 10000 ** (-torch.arange(0, 8, 2).double() / 8))
    turns = torch.polar(torch.ones_like(angles), angles)
    q, k = (torch.complex(*t.chunk(2, dim=-1)) * turns for t in (q, k))
    q, k = (torch.cat((t.real, t.imag), dim=-1) for t in (q, k))
    rates = torch.sigmoid(x @ mixer.rates.weight.T + mixer.rates.bias).mT / 8
    decays = (1 / torch.arange(1.0, 5.0).double() + mixer.places).clamp_min(0)
    W, b, outputs = mixer.weight, mixer.bias, []
    for query, key, value, rate in zip(*(t.split(4, dim=2) for t in (q, k, v, rates)), strict=True):
        eta = decays[:, None] * rate[:, :, None]
        gradient = inner_gradient(
            key @ W + b, value - key, mixer.norm_weight, mixer.norm_bias
        )  # equal to autograd's in the test above
        read = query @ W - (eta * (query @ key.mT).tril()) @ gradient + b - eta.tril() @ gradient
        outputs.append(query + mixer.norm_weight * F.layer_norm(read, (8,), eps=1e-6) + mixer.norm_bias)
        last = eta[:, :, -1, :, None]
        W, b = W - (last * key).mT @ gradient, b - (last * gradient).sum(dim=-2, keepdim=True)
    o = torch.cat(outputs, dim=2).transpose(1, 2).flatten(2)
    expected = mixer.out(F.layer_norm(o, (16,), mixer.norm.weight, mixer.norm.bias, 1e-6))
    torch.testing.assert_close(mixer(x), expected, rtol=1e-10, atol=1e-11)


def test_equals_flas_naive_form_where_the_rule_is_the_same():
    """fla scales by the rate of the reading token, the authors by the rates of the tokens read; equal for one rate."""
    naive = pytest.importorskip("fla.ops.ttt.naive").ttt_linear
    torch.manual_seed(0)
    mixer = moved(TTTLinear(16, 0, 2, n_heads=2, mini_batch=8))
    with torch.no_grad():
        mixer.places.copy_(1 - 1 / torch.arange(1, 9))
    q, k, v = torch.randn(3, 2, 24, 2, 8)
    rates = torch.full((2, 24, 2, 1), 0.1)
    o = mixer._train(q, k, v, rates, mixer.init_state(2, 24, "cpu", torch.float32))
    heads = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    start = mixer.weight.expand(2, -1, -1, -1), mixer.bias.expand(2, -1, -1, -1)
    read = naive(*heads, mixer.norm_weight, mixer.norm_bias, rates.transpose(1, 2), 1.0, 1e-6, 8, *start, False)[0]
    # fla adds what is read, the authors add the query; subtract both
    residual = (o - q) - read.transpose(1, 2)
    normed = (o - q - mixer.norm_bias.squeeze(1)) / mixer.norm_weight.squeeze(1)
    again = F.layer_norm(-residual, (8,), eps=1e-6)
    torch.testing.assert_close(again, normed, rtol=1e-3, atol=1e-3)


def compare(device: str, size: int, mini_batch: int, tolerance: float):
    """The kernels' outputs and all gradients against the reference in float64, by relative error."""
    torch.manual_seed(0)
    B, T, H = 2, 3 * mini_batch, 2
    q, k, target = torch.randn(3, B, T, H, size)
    shapes = {"rates": (B, T, H, 1), "decays": (mini_batch,)}
    rates, decays = (0.2 * torch.rand(shape) for shape in shapes.values())
    weight, bias = 0.2 * torch.randn(B, H, size, size), 0.2 * torch.randn(B, H, 1, size)
    gain, shift = 1 + 0.2 * torch.randn(H, 1, size), 0.2 * torch.randn(H, 1, size)
    inputs = [t.to(device) for t in (q, k, target, rates, decays, weight, bias, gain, shift)]
    given = [torch.randn(shape, device=device) for shape in (q.shape, weight.shape, bias.shape)]
    found = {}
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        results = TTT_LINEAR.run(backend, *leaves)
        gradients = torch.autograd.grad(results, leaves, [t.to(dtype) for t in given])
        found[backend] = [t.detach().double() for t in (*results, *gradients)]
    for mine, right in zip(found["triton"], found["reference"], strict=True):
        assert mine.shape == right.shape
        assert (mine - right).norm() <= tolerance * right.norm()


@pytest.mark.parametrize(("size", "mini_batch"), [(16, 16), (64, 16), (32, 32)])
def test_kernels_equal_the_reference_in_the_interpreter(size, mini_batch):
    pytest.importorskip("triton")
    call = f"import {Path(__file__).stem} as tests; tests.compare('cpu', {size}, {mini_batch}, 1e-4)"
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": folders}
    subprocess.run([sys.executable, "-c", call], check=True, timeout=300, env=environment)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "mini_batch"), [(64, 16), (128, 16), (32, 64)])
def test_kernels_equal_the_reference(size, mini_batch):
    compare("cuda", size, mini_batch, 1e-2)


@pytest.mark.parametrize(("options", "why"), [({"mini_batch": 8}, "mini-batches of"), ({"n_heads": 2}, "heads of")])
def test_the_kernels_say_which_sizes_they_take(options, why):
    mixer = TTTLinear(48, 0, 2, **{"n_heads": 3, "backend": "triton", **options})
    with pytest.raises(UserError, match=why):
        mixer(torch.randn(1, 64, 48))


@pytest.mark.parametrize("option", ["learning_rate", "rope_base"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -3.0])
def test_numbers_that_give_no_numbers_are_refused(option, value):
    with pytest.raises(UserError, match=rf"{option} must be (positive|above 1)(, and finite)?, not {value}"):
        TTTLinear(16, 0, 2, **{"n_heads": 2, option: value})
