"""MesaNet keeps the contract, solves the equations of the paper and equals fla's naive forms."""

import collections
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import seqarch_zoo.mesa_net as module
import torch
from mesa_solver import direct, draw
from seqarch_zoo.mesa_net import MesaNet, mesa_net

from seqarch.testing import MixerSuite


class TestMesaNet(MixerSuite):
    mixer = MesaNet
    options: ClassVar = [{"n_heads": 4, "cg_steps": 9}]

    @pytest.fixture(autouse=True)
    def _short_chunks(self, monkeypatch):
        monkeypatch.setattr(module, "CHUNK_SIZE", 8)


def direct_solution() -> Any:
    """Inputs, outputs and final states."""
    inputs = draw(2, 64, 3, 8)
    return list(inputs.values()), *direct(**inputs)


def test_solves_the_equations_of_the_paper(monkeypatch):
    monkeypatch.setattr(module, "CG_EPS", 1e-30)  # the authors' epsilon ends the descent before it has converged
    inputs, expected, *states = direct_solution()
    o, final = mesa_net(*inputs, cg_steps=40)
    torch.testing.assert_close(o, expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(final, tuple(states), rtol=1e-10, atol=1e-10)


def test_with_the_authors_epsilon_it_comes_near():
    inputs, expected, *_ = direct_solution()
    torch.testing.assert_close(mesa_net(*inputs)[0], expected, rtol=0, atol=2e-3)


def test_equals_flas_naive_conjugate_gradients():
    naive = pytest.importorskip("fla.ops.mesa_net.naive").naive_mesa_net_CG
    q, k, v, g, beta, regulariser = (t.float() for t in draw(2, 64, 3, 8).values())
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


def test_kernels_in_the_interpreter():
    """The tests of the kernels that need no GPU, in a process that has not yet imported Triton."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += [str(Path(__file__).with_name("test_mesa_kernels.py"))]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(command, timeout=600, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


@pytest.mark.parametrize("size", [5, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compile_for_an_h100_and_fit_its_shared_memory(size, dtype, monkeypatch):
    pytest.importorskip("triton")
    from seqarch_zoo import mesa_triton

    kernels = {name: kernel for name, kernel in vars(mesa_triton).items() if name.endswith("_kernel")}
    launches: dict[str, list[tuple[Any, Any]]] = collections.defaultdict(list)
    for name in kernels:
        launch = partial(lambda name, *args, **options: launches[name].append((args, options)), name)
        monkeypatch.setattr(mesa_triton, name, collections.defaultdict(lambda launch=launch: launch))
    borders = torch.tensor([0, 1, 9]).int()
    for length, cu_seqlens in ((9, borders), (80, None)):
        inputs = [t.float() if t.dim() < 4 else t.to(dtype) for t in draw(1, length, 2, size).values()]
        inputs[0].requires_grad_()
        inputs[1].requires_grad_()
        module._triton(*inputs, 30, None, cu_seqlens)[0].sum().backward()
    assert {name: len(each) for name, each in launches.items()} == {
        "solve_kernel": 6,
        "carry_kernel": 3,
        "carry_back_kernel": 3,
    }
    for name, calls in launches.items():
        for args, options in calls[1:3]:
            compiled = compile_for_an_h100(kernels[name], args, options)
            assert 0 <= compiled.metadata.shared <= 227 * 1024


def compile_for_an_h100(kernel: Any, args: Any, options: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named = dict(zip(kernel.arg_names, args, strict=True))
    tensors = [name for name, value in named.items() if isinstance(value, torch.Tensor)]
    assert all(named[name].dtype == torch.float32 for name in tensors)
    numbers = dict.fromkeys(named.keys() & {"steps", "N"}, "i32")
    signature = dict.fromkeys(named, "constexpr") | dict.fromkeys(tensors, "*fp32") | numbers
    constants = {name: value for name, value in named.items() if signature[name] == "constexpr"}
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(tensors))}
    return triton.compile(ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", 90, 32), options)
