"""MesaNet keeps the contract, solves the equations of the paper and equals fla's naive forms."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import seqarch_zoo.mesa_net as module
import torch
import torch.nn.functional as F
from seqarch_zoo.mesa_net import Gram, Implicit, MesaNet, conjugate_gradients, mesa_net
from torch.utils.checkpoint import checkpoint

from seqarch.testing import MixerSuite


class TestMesaNet(MixerSuite):
    mixer = MesaNet
    options: ClassVar = [{"n_heads": 4, "cg_steps": 9}]

    @pytest.fixture(autouse=True)
    def _short_chunks(self, monkeypatch):
        monkeypatch.setattr(module, "CHUNK_SIZE", 8)


def inputs(dtype=torch.float64, size=8, length=64) -> Any:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, 3, size, generator=generator, dtype=torch.float64) for _ in range(3))
    decay, beta = torch.randn(2, 2, length, 3, generator=generator, dtype=torch.float64)
    regulariser = 0.25 + torch.rand(3, size, generator=generator, dtype=torch.float64)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return [t.to(dtype) for t in (q, k, v, F.logsigmoid(decay + 3), beta.sigmoid(), regulariser)]


def direct_solution():
    """Equations 6 to 9 token by token with a direct solver, in float64: inputs, outputs, final states."""
    q, k, v, g, beta, regulariser = inputs()
    G = S = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    expected = []
    for t in range(64):
        decay, key = g[:, t, :, None, None].exp(), (beta[:, t, :, None] * k[:, t])[..., None]
        G = decay * G + key * k[:, t, :, None, :]
        S = decay * S + key * v[:, t, :, None, :]
        solved = torch.linalg.solve(G + torch.diag_embed(regulariser), q[:, t])
        expected.append((S.mT @ solved[..., None])[..., 0])
    return (q, k, v, g, beta, regulariser), torch.stack(expected, dim=1), (G, S)


def test_solves_the_equations_of_the_paper(monkeypatch):
    monkeypatch.setattr(module, "CG_EPS", 1e-30)  # the authors' epsilon ends the descent before it has converged
    inputs, expected, states = direct_solution()
    o, final = mesa_net(*inputs, cg_steps=40)
    torch.testing.assert_close(o, expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(final, states, rtol=1e-10, atol=1e-10)


def test_with_the_authors_epsilon_it_comes_near():
    inputs, expected, _ = direct_solution()
    torch.testing.assert_close(mesa_net(*inputs)[0], expected, rtol=0, atol=2e-3)


def test_equals_flas_naive_conjugate_gradients():
    naive = pytest.importorskip("fla.ops.mesa_net.naive").naive_mesa_net_CG
    q, k, v, g, beta, regulariser = inputs(torch.float32)
    expected, gram, sums = naive(q, k, v, g, regulariser, beta, 16, max_CG_iteration=12)
    o, state = mesa_net(q, k, v, g, beta, regulariser, cg_steps=12)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, (gram, sums), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@torch.no_grad()
def test_equals_flas_layer_with_its_weights():
    layers = pytest.importorskip("fla.layers")
    torch.manual_seed(0)
    theirs = layers.MesaNet(hidden_size=256, num_heads=4, head_dim=64, layer_idx=0).cuda()
    ours = MesaNet(256, 0, 2, n_heads=4).cuda()
    ours.qk.weight.copy_(torch.cat([theirs.q_proj.weight, theirs.k_proj.weight]))
    convolution: Any = ours.convolution
    convolution.weight.copy_(torch.cat([theirs.q_conv1d.weight, theirs.k_conv1d.weight]).squeeze(1))
    ours.steps.weight.copy_(torch.cat([theirs.a_proj.weight, theirs.b_proj.weight]))
    ours.steps.bias.copy_(torch.cat([theirs.a_proj.bias, theirs.b_proj.bias]))
    ours.regulariser.copy_(theirs.lambda_params)
    ours.norm.weight.copy_(theirs.o_norm.weight)
    ours.value.load_state_dict(theirs.v_proj.state_dict())
    ours.out.load_state_dict(theirs.o_proj.state_dict())
    x = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16)
    expected = theirs.bfloat16()(x)[0]
    torch.testing.assert_close(ours.bfloat16()(x), expected, rtol=0.05, atol=0.02 * expected.abs().max().item())


def compare(device: str, size: int, length: int, scale: float, tolerance: float):
    """The kernels' outputs, states and all gradients, of one size, against a direct solver in float64."""
    tensors = [t.to(device).requires_grad_() for t in inputs(torch.float64, size, length)]
    q, k, v, g, beta, regulariser = tensors
    sums, steps = g.mT.cumsum(dim=-1), beta.mT
    later = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    ratio = (sums[..., None] - sums[..., None, :]).masked_fill(later, -1e9).exp() * steps[..., None, :]
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    gram = torch.einsum("bhti,bihk,bihl->bhtkl", ratio, k, k) + torch.diag_embed(regulariser)[:, None]
    right = (((torch.linalg.solve(gram, heads[0]) @ heads[1].mT) * ratio) @ heads[2]).transpose(1, 2)
    weights = scale * torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).to(right)
    expected = [right, *torch.autograd.grad(right, tensors, weights)]
    singles = [t.detach().float().requires_grad_() for t in tensors]
    o, _ = mesa_net(*singles, cg_steps=40, backend="triton")
    found = [o, *torch.autograd.grad(o, singles, weights.float())]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize(("size", "length", "scale"), [(16, 40, 1.0), (24, 70, 1e-8), (64, 5, 1.0)])
def test_kernels_equal_a_direct_solver_in_the_interpreter(size, length, scale):
    pytest.importorskip("triton")
    call = f"import {Path(__file__).stem} as tests; tests.compare('cpu', {size}, {length}, {scale}, 1e-4)"
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": folders}
    subprocess.run([sys.executable, "-c", call], check=True, timeout=300, env=environment)


def test_the_implicit_gradient_keeps_nothing_under_activation_checkpointing():
    kept: list[weakref.ref] = []

    def solve(k):
        ratio = torch.eye(4).repeat(1, 1, 1, 1, 1)
        gram = Gram(2 * k, ratio, ratio[..., :1], torch.eye(3).repeat(1, 1, 1, 1, 1), torch.ones(1, 1, 1, 3))
        kept.extend(weakref.ref(each) for each in gram)
        x = conjugate_gradients(gram, k, 5).detach()
        return x + Implicit.apply(k - gram.times(x), conjugate_gradients, gram, 5)

    k = torch.randn(1, 1, 1, 4, 3, requires_grad=True)
    expected = torch.autograd.grad(solve(k).sum(), k)
    kept.clear()
    x = checkpoint(solve, k, use_reentrant=False)
    gc.collect()
    assert [each() for each in kept] == [None] * 5
    torch.testing.assert_close(torch.autograd.grad(x.sum(), k), expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "length", "scale"), [(64, 200, 1.0), (128, 300, 1e-8), (48, 5, 1.0)])
def test_kernels_equal_a_direct_solver(size, length, scale):
    compare("cuda", size, length, scale, 1e-2)
