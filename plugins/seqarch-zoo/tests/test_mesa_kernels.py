"""MesaNet's Triton kernels against a direct solver in float64.

They run on a GPU (`-m gpu`). With TRITON_INTERPRET=1 they run on the CPU, in the interpreter: there products are
exact, so they say nothing about those of three bf16 products each. Some tests need a GPU.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from typing import Any

import pytest
import seqarch_zoo.mesa_net as module
import torch
from mesa_solver import direct, draw
from seqarch_zoo.mesa_net import Gram, MesaNet, mesa_net
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seqarch.kernels.op import interpreting
from seqarch.testing.compare import poisoned_memory

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
DEVICE = "cpu" if interpreting() else "cuda"
on_a_gpu = pytest.mark.skipif(interpreting(), reason="needs a GPU")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"""Errors by norm. Products in TF32 would miss the first; with bf16, outputs and gradients are rounded."""


@pytest.fixture(autouse=True)
def _poison():
    """Memory that nobody wrote is NaN, and PyTorch's products are exact."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with poisoned_memory():
        yield
    torch.set_float32_matmul_precision(before)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. Documents are lengths of sequences packed into one row; without them there are two rows of T."""

    K: int
    T: int = 0
    documents: tuple[int, ...] = ()
    state: bool = False
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    steps: int = 30
    V: int | None = None


def arguments(case: Case) -> tuple[dict[str, Tensor], list[slice]]:
    """The arguments as `direct` takes them, and the rows, or parts of one row, that are documents."""
    rows, length = (1, sum(case.documents)) if case.documents else (2, case.T)
    inputs = draw(rows, length, 2, case.K, case.V)
    states = len(case.documents) or rows
    if case.state:
        wide = draw(states, 2 * case.K, 2, case.K, case.V)
        _, inputs["gram"], inputs["sums"] = direct(**wide)
    ends = torch.tensor([0, *case.documents]).cumsum(0).tolist()
    return inputs, [slice(a, b) for a, b in itertools.pairwise(ends)]


def expected(inputs: dict[str, Tensor], documents: list[slice]) -> list[Tensor]:
    """Outputs and final states of each document by itself."""
    if not documents:
        return list(direct(**inputs))
    along, found = ("q", "k", "v", "log_decay", "beta"), []
    for n, part in enumerate(documents):
        one = {name: t[:, part] if name in along else t for name, t in inputs.items()}
        one |= {name: inputs[name][n : n + 1] for name in ("gram", "sums") if name in inputs}
        found.append(direct(**one) if part.start < part.stop else (one["v"], one["gram"], one["sums"]))
    return [torch.cat(each, dim=1 if n == 0 else 0) for n, each in enumerate(zip(*found, strict=True))]


def run(inputs: dict[str, Tensor], documents: list[slice], steps: int) -> list[Tensor]:
    """Outputs and final states of the kernels."""
    options: dict[str, Any] = {"cg_steps": steps, "backend": "triton"}
    given = dict(inputs)
    if "gram" in inputs:
        options["initial_state"] = given.pop("gram"), given.pop("sums")
    if documents:
        options["cu_seqlens"] = torch.tensor([0, *(part.stop for part in documents)], device=DEVICE).int()
    o, final = mesa_net(**given, **options)
    return [o, *final]


def compare(case: Case) -> None:
    """Outputs, final states and the gradients of all inputs."""
    drawn, documents = arguments(case)
    halves = ("q", "k", "v")
    narrow = {name: t.to(case.dtype if name in halves else torch.float32) for name, t in drawn.items()}
    wide = {name: t.double().requires_grad_() for name, t in narrow.items()}
    given = {name: t.to(DEVICE).requires_grad_() for name, t in narrow.items()}
    wanted = expected(wide, documents)
    generator = torch.Generator().manual_seed(1)
    weights = [case.scale * torch.randn(t.shape, generator=generator).to(case.dtype).double() for t in wanted]
    wanted += torch.autograd.grad(wanted, list(wide.values()), weights)
    found = run(given, documents, case.steps)
    weights = [w.to(t) for w, t in zip(weights, found, strict=True)]
    found += torch.autograd.grad(found, list(given.values()), weights)
    names = ["o", "final G", "final S", *(f"gradient of {name}" for name in given)]
    for name, a, b in zip(names, found, wanted, strict=True):
        assert a.shape == b.shape, name
        difference = a.cpu().double() - b
        if name == "gradient of gram":  # what matters for matrices that are symmetric
            difference, b = difference + difference.mT, b + b.mT
        size = b.norm().clamp_min(0.1 * (case.scale if "gradient" in name else 1))
        error = (difference.norm() / size).item()
        assert error <= TOLERANCE[case.dtype], f"{name}: {error:.1e}"


SIZES = [(16, 1), (5, 17), (24, 31), (48, 65), (64, 63), (80, 18), (128, 16)]
SIZES += [pytest.param(*size, marks=on_a_gpu) for size in ((64, 129), (80, 130), (128, 65), (128, 300))]  # pyright: ignore


@pytest.mark.parametrize(("K", "T"), SIZES)
def test_sizes_of_heads_and_odd_lengths(K, T):
    compare(Case(K, T))


def test_values_of_another_size():
    compare(Case(24, 40, V=40))


@pytest.mark.parametrize(("K", "T"), [(64, 70), (20, 5)])
def test_states(K, T):
    compare(Case(K, T, state=True))


@pytest.mark.parametrize("state", [False, True])
def test_packed_documents(state):
    """One of one token, some that fill their chunks or do not, and with states an empty one, which keeps its state."""
    compare(Case(40, documents=(1, 64, 0, 37, 67) if state else (1, 64, 37, 67), state=state))


@pytest.mark.parametrize(("K", "documents"), [(64, (33, 1, 70)), (128, ())])
def test_inputs_in_bf16(K, documents):
    compare(Case(K, 20, documents, state=True, dtype=torch.bfloat16))


@pytest.mark.parametrize("scale", [1e-8, 1e-20, 1e12])
def test_gradients_of_any_size(scale):
    """The squares of the smallest underflow."""
    compare(Case(32, 40, scale=scale))


def test_more_steps_than_needed():
    """A residual that is zero within rounding is not divided by itself any more."""
    compare(Case(16, 20, steps=150))


def test_tokens_without_a_query_or_a_gradient():
    inputs = {name: t.float().to(DEVICE) for name, t in draw(1, 20, 2, 16).items()}
    inputs["q"][:, ::3] = 0
    q = inputs["q"].requires_grad_()
    o = run(inputs, [], 40)[0]
    (gradient,) = torch.autograd.grad(o[:, ::2].sum(), q)
    assert torch.equal(o[:, ::3], torch.zeros_like(o[:, ::3]))
    assert torch.equal(gradient[:, 1::2], torch.zeros_like(gradient[:, 1::2]))
    assert gradient[:, ::2].isfinite().all()
    assert (gradient[:, ::2] != 0).all()


def test_no_rows():
    inputs = {name: t.float().to(DEVICE) for name, t in draw(1, 20, 2, 16).items()}
    found = run({name: t if name == "regulariser" else t[:0] for name, t in inputs.items()}, [], 40)
    assert [t.shape[0] for t in found] == [0, 0, 0]


def test_what_is_not_a_number_shows():
    inputs = {name: t.float().to(DEVICE) for name, t in draw(2, 20, 2, 16).items()}
    for name in ("q", "k", "v"):
        spoilt = {**inputs, name: inputs[name].clone()}
        spoilt[name][0, 3, 1, 0] = float("nan")
        o = run(spoilt, [], 40)[0]
        assert o[0, 3, 1].isnan().any(), name
        assert o[1].isfinite().all(), name
        assert o[:, :, 0].isfinite().all(), name


@on_a_gpu
def test_two_runs_give_the_same_bits():
    drawn, _ = arguments(Case(64, 200))
    inputs = {name: t.float().to(DEVICE).requires_grad_() for name, t in drawn.items()}
    found = []
    for _ in range(2):
        results = run(inputs, [], 30)
        found.append([*results, *torch.autograd.grad(results[0].square().sum(), [inputs["q"], inputs["log_decay"]])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_layer_trains_and_decodes_under_autocast(monkeypatch):
    """Outputs and gradients as in PyTorch; a sequence in pieces, the last of one token, as the whole."""
    monkeypatch.setattr(module, "CG_EPS", 1e-30)  # the authors' epsilon ends the descent before it has converged
    layers = {name: MesaNet(64, 0, 2, n_heads=2, backend=name).to(DEVICE) for name in ("reference", "triton")}
    layers["reference"].load_state_dict(layers["triton"].state_dict())
    convolutions: dict[str, Any] = {name: layer.convolution for name, layer in layers.items()}
    convolutions["reference"].backend = convolutions["triton"].backend  # its bf16 results differ, by 0.6 %
    x = torch.randn(2, 70, 64, device=DEVICE)
    triton = layers["triton"]
    with torch.autocast(DEVICE, torch.bfloat16):
        results = {name: layer(x) for name, layer in layers.items()}
        with torch.no_grad():
            state = triton.init_state(2, 70, DEVICE, torch.bfloat16)
            pieces = [triton(piece, state=state) for piece in x.split((50, 19, 1), dim=1)]
    gradients = {
        name: torch.autograd.grad(o.float().square().sum(), list(layers[name].parameters()))
        for name, o in results.items()
    }
    pairs = [(torch.cat(pieces, dim=1), results["triton"]), (results["triton"], results["reference"])]
    pairs += zip(gradients["triton"], gradients["reference"], strict=True)
    for a, b in pairs:
        assert (a - b).double().norm() <= 5e-3 * b.double().norm()


def test_the_gradient_keeps_nothing_under_activation_checkpointing():
    kept: list[weakref.ref] = []

    def run(k: Tensor) -> Tensor:
        ratio = torch.eye(16, device=DEVICE).repeat(1, 1, 1, 1, 1)
        square, one = torch.eye(3, device=DEVICE).repeat(1, 1, 1, 1, 1), torch.ones(1, 1, 1, 3, device=DEVICE)
        gram = Gram(2 * k, ratio, ratio[..., :1], square, one)
        kept.extend(weakref.ref(each) for each in gram)
        return module._solve(gram, k, 5)

    k = torch.randn(1, 1, 1, 16, 3, device=DEVICE, requires_grad=True)
    expected = torch.autograd.grad(run(k).sum(), k)
    kept.clear()
    x = checkpoint(run, k, use_reentrant=False)
    gc.collect()
    assert [each() for each in kept] == [None] * 5
    torch.testing.assert_close(torch.autograd.grad(x.sum(), k), expected, rtol=0, atol=0)


def test_a_compiled_layer_is_one_graph():
    """It gives the outputs and gradients that the layer gives."""
    layer = MesaNet(32, 0, 2, n_heads=2, cg_steps=8, backend="triton").to(DEVICE)
    x = torch.randn(2, 70, 32, device=DEVICE)
    results = [layer(x), torch.compile(layer, fullgraph=True)(x)]
    gradients = [torch.autograd.grad(o.square().sum(), list(layer.parameters())) for o in results]
    for a, b in [(results[1], results[0]), *zip(*reversed(gradients), strict=True)]:
        assert (a - b).double().norm() <= 1e-4 * b.double().norm()


def test_results_lie_in_memory_as_compilers_are_told():
    """Compiled code reads a result with the strides of the operator's fake, whatever the strides of its arguments."""
    from seqarch_zoo import mesa_triton as ops

    def turned(*shape: int) -> Tensor:
        return torch.rand(shape[::-1], device=DEVICE).permute(*reversed(range(len(shape))))

    k, ratio, passed, regulariser = (
        turned(1, 2, 3, 16, 4),
        turned(1, 2, 3, 16, 16),
        turned(1, 2, 3, 16, 1),
        turned(2, 1, 1, 4),
    )
    square = turned(1, 2, 3, 4, 4)
    system = k, ratio, passed, square, regulariser
    for operator, arguments in {
        ops.solve: (*system, k, 3),
        ops.solved_gradient: (*system, k, 3),
        ops.carry: (square, turned(1, 2, 3, 1, 1), turned(1, 2, 4, 4)),
        ops.carry_backward: (square, turned(1, 2, 4, 4), turned(1, 2, 3, 1, 1), square),
    }.items():
        torch.library.opcheck(operator, arguments, test_utils="test_faketensor")


@on_a_gpu
def test_more_than_two_billion_elements():
    """The last chunks of a large call are solved as by themselves. The call holds 45 GiB."""
    from seqarch_zoo.mesa_triton import solve

    chunks, C, K, few = 2**31 // 64**2 + 5, 64, 64, 7
    if torch.cuda.mem_get_info()[0] < 50 * 2**30:
        pytest.skip("needs 50 GiB of free GPU memory")

    def uniform(*shape: int) -> Tensor:
        return torch.rand(1, 1, chunks, *shape, device=DEVICE).div_(64)

    gram = Gram(uniform(C, K), uniform(C, C), uniform(C, 1), uniform(K, K), torch.ones(1, 1, 1, K, device=DEVICE))
    right = uniform(C, K)
    assert min(t.numel() for t in (gram.k, gram.ratio, gram.before, right)) > 2**31
    found = solve(*gram, right, 3)[:, :, -few:]
    k, ratio, passed, before = (t[:, :, -few:] for t in gram[:4])
    assert torch.equal(found, solve(k, ratio, passed, before, gram.regulariser, right[:, :, -few:], 3))
    assert found.isfinite().all()
    assert (found[..., 0] != 0).all()
