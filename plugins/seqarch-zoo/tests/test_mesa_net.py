"""MesaNet keeps the contract, solves the equations of the paper and equals fla's naive forms."""

from functools import partial
from typing import Any, ClassVar

import pytest
import seqarch_zoo.mesa_net as module
import torch
import torch.nn.functional as F
from seqarch_zoo.mesa_net import MesaNet, mesa_net

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
def test_kernels_equal_the_reference():
    q, k, v, g, beta, regulariser = (t.cuda() for t in inputs(torch.float32, 64, 200))
    q, k, v = (t.bfloat16() for t in (q, k, v))
    o, _ = mesa_net(q, k, v, g, beta, regulariser)
    expected, _ = mesa_net(q.float(), k.float(), v.float(), g, beta, regulariser, backend="reference")
    torch.testing.assert_close(o.float(), expected, rtol=0.05, atol=0.03)


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


def dense(q, k, v, g, beta, regulariser):
    """Decays times step sizes `[B, H, T, T]`, and the Gram matrix of each token `[B, H, T, K, K]`."""
    g, beta = g.mT.cumsum(dim=-1), beta.mT
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool).triu(1)
    weights = (g[..., None] - g[..., None, :]).masked_fill(later, -1e9).exp() * beta[..., None, :]
    return weights, torch.einsum("bhti,bihk,bihl->bhtkl", weights, k, k) + torch.diag_embed(regulariser)[:, None]


class FlaGradients(torch.autograd.Function):
    """Gradients of q, k and v as fla's kernels compute them (fla/ops/mesa_net/chunk.py), dense and in float64."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, regulariser):
        ctx.save_for_backward(q, k, v, g, beta, regulariser)
        weights, gram = dense(q, k, v, g, beta, regulariser)
        ctx.x = torch.linalg.solve(gram, q.transpose(1, 2))
        return ((ctx.x @ k.permute(0, 2, 3, 1) * weights) @ v.transpose(1, 2)).transpose(1, 2)

    @staticmethod
    def backward(ctx, do):
        weights, gram = dense(*ctx.saved_tensors)
        x, (k, v, do) = ctx.x, (t.transpose(1, 2) for t in (*ctx.saved_tensors[1:3], do))
        from_values = do @ v.mT * weights
        dq = module.conjugate_gradients(lambda p: (gram @ p[..., None])[..., 0], from_values @ k, 30)
        dq = dq.half().to(x.dtype)
        twice = ((weights * (x @ k.mT)).mT @ dq) + (weights * (dq @ k.mT)).mT @ x
        gradients = dq, from_values.mT @ x - twice, (x @ k.mT * weights).mT @ do
        return *(each.transpose(1, 2) for each in gradients), None, None, None


@pytest.mark.parametrize("size", [1.0, 1e-8, 0.0])
def test_gradients_of_any_size_pass_flas_solver(monkeypatch, size):
    def chunk_mesa_net(q, k, v, g, beta, lamb, **options):
        return FlaGradients.apply(q, k, v, g, beta, lamb), torch.zeros(1), torch.zeros(1)

    monkeypatch.setattr(module, "fla_op", lambda *name: chunk_mesa_net)
    tensors, run = [t.requires_grad_() for t in inputs()], partial(module._fla, cg_steps=30)
    weights = size * torch.randn(2, 64, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad(run(*tensors, initial_state=None, cu_seqlens=None)[0], tensors[:3], weights)
    weighted, gram = dense(*tensors)
    q, k, v = (t.transpose(1, 2) for t in tensors[:3])
    o = (torch.linalg.solve(gram, q) @ k.mT * weighted) @ v
    expected = torch.autograd.grad(o.transpose(1, 2), tensors[:3], weights)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 2e-3 * other.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_gradients_of_the_kernels_equal_those_of_the_reference(size):
    tensors = [t.cuda() for t in inputs(torch.float32, 64, 200)]
    weights = size * torch.randn(2, 200, 3, 64, device="cuda")
    half = [t.bfloat16().requires_grad_() for t in tensors[:3]] + [t.requires_grad_() for t in tensors[3:]]
    full = [t.detach().float().requires_grad_() for t in half]
    found = torch.autograd.grad(mesa_net(*half)[0], half, weights.bfloat16())
    expected = torch.autograd.grad(mesa_net(*full, backend="reference")[0], full, weights.bfloat16().float())
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other).norm() <= 0.05 * other.norm()
