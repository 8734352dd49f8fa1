"""The recurrence of Mamba-2: chunks against single steps, backends against the float64 reference."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import ssd
from seqarch.kernels.ssd.op import ssd_chunked, ssd_recurrent
from seqarch.testing.compare import relative_error
from tests.kernels.inputs import ssd as draw
from tests.kernels.precision import TF32_TOLERANCE, DroppedBits, assert_near_float64

DECAYS = ["full", "one", "none"]


def loss_weights(outputs: dict[str, Tensor]) -> list[Tensor]:
    """How much the elements of the outputs and of the final state weigh in the loss of `results`."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(outputs[n].shape, generator=generator).to(outputs[n].device).double() for n in ("y", "state")]


def results(arguments: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """Outputs, final state and the gradients of a weighted sum of both."""
    y, state = ssd(**arguments, **options)
    outputs = {"y": y, "state": state}
    loss: Any = sum((t.double() * w).sum() for t, w in zip((y, state), loss_weights(outputs), strict=True))
    leaves = {name: t for name, t in {**arguments, **options}.items() if isinstance(t, Tensor) and t.requires_grad}
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {**outputs, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


def as_fla_in_tf32(arguments: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """The reference with products in TF32. The gradient of A comes from the gradients of B and C, as in fla.

    The gradient of a token's log decay sums `C dC - B dB` over this token and all later ones of its document. The last
    token adds the final state's part. The two products nearly cancel, but their errors do not.
    """
    with DroppedBits():
        found = results(arguments, **options, backend="reference")
        heads = arguments["x"].shape[2]
        shared = {n: arguments[n].detach().repeat_interleave(heads // arguments[n].shape[2], 2) for n in "BC"}
        each = results(
            {**arguments, **{n: t.requires_grad_() for n, t in shared.items()}}, **options, backend="reference"
        )
    at_c, at_b = ((shared[n].detach() * each[f"d{n}"]).sum(-1) for n in "CB")
    dg = at_c - at_b
    borders = options.get("cu_seqlens", torch.tensor([0, dg.shape[1]])).tolist()
    at_end = (each["state"].detach() * loss_weights(each)[1].to(dg)).sum((-1, -2))
    for document, (start, stop) in enumerate(itertools.pairwise(borders)):
        rows = at_end if "cu_seqlens" not in options else at_end[document : document + 1]
        dg[:, stop - 1] += rows
        dg[:, start:stop] = dg[:, start:stop].flip(1).cumsum(1).flip(1)
    return {**found, "dA": (dg * arguments["dt"].detach()).sum((0, 1))}


def widened(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: None if t is None else t.detach().double().requires_grad_() for name, t in arguments.items()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float, plain: Any = None) -> None:
    assert got.keys() == want.keys()
    assert_near_float64(got, want, tolerance, plain)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("length", "groups"), [(1, 1), (2, 2), (63, 4), (64, 1), (65, 2), (150, 1), (150, 4)])
def test_chunks_are_the_recurrence(length: int, groups: int, decay: str) -> None:
    arguments = draw(T=length, G=groups, decay=decay)
    x = (arguments["x"] * arguments["dt"][..., None]).detach().requires_grad_()
    g = arguments.get("log_decay") if arguments["A"] is None else arguments["dt"] * arguments["A"]
    g = None if g is None else g.detach().requires_grad_()
    for state in (None, torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True)):
        leaves = [t for t in (x, g, arguments["B"], arguments["C"], state) if t is not None]
        found = []
        for form in (ssd_recurrent, ssd_chunked):
            y, final = form(x, g, arguments["B"], arguments["C"], state)
            loss = (y * x.detach().sin()).sum() + (final * torch.arange(6)).sum()
            found.append((y, final, *torch.autograd.grad(loss, leaves)))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("decay", DECAYS)
def test_definition(decay: str) -> None:
    arguments = draw(1, 9, H=2, G=2, decay=decay)
    y, final = ssd(**arguments)
    x, dt, B, C = (arguments[name][0] for name in ("x", "dt", "B", "C"))
    for h in range(2):
        state = torch.zeros(5, 6, dtype=torch.float64)
        for t in range(9):
            a = torch.ones(())
            if decay == "full":
                a = (dt[t, h] * arguments["A"][h]).exp()
            elif decay == "one":
                a = arguments["log_decay"][0, t, 0].exp()
            state = a * state + dt[t, h] * torch.outer(B[t, h], x[t, h])
            torch.testing.assert_close(y[0, t, h], state.T @ C[t, h])
        torch.testing.assert_close(final[0, h], state)


def test_heads_share_the_projections_of_their_group() -> None:
    arguments = draw(G=2)
    repeated = {**arguments, **{name: arguments[name].repeat_interleave(2, dim=2) for name in "BC"}}
    torch.testing.assert_close(ssd(**arguments), ssd(**repeated))


def test_state_continues() -> None:
    arguments = draw()
    whole, final = ssd(**arguments)
    state, outputs = None, []
    for start, stop in ((0, 70), (70, 71), (71, 150)):
        piece = {name: t if name == "A" else t[:, start:stop] for name, t in arguments.items()}
        y, state = ssd(**piece, initial_state=state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("decay", DECAYS)
def test_packed_documents(decay: str) -> None:
    arguments = draw(1, decay=decay)
    borders = torch.tensor([0, 3, 3, 100, 150], dtype=torch.int32)
    initial = torch.randn(4, 4, 5, 6, dtype=torch.float64)
    y, final = ssd(**arguments, cu_seqlens=borders, initial_state=initial)
    for n, (start, stop) in enumerate([(0, 3), (3, 3), (3, 100), (100, 150)]):
        if start == stop:
            assert torch.equal(final[n], initial[n])
            continue
        piece: dict[str, Any] = {k: t if k == "A" else t[:, start:stop] for k, t in arguments.items()}
        alone, state = ssd(**piece, initial_state=initial[n : n + 1])
        torch.testing.assert_close(y[:, start:stop], alone)
        torch.testing.assert_close(final[n], state[0])


def test_decays_that_underflow() -> None:
    """A strong decay forgets all earlier tokens and leaves later weak decays exact. Long sequences stay finite."""
    arguments = draw(1, 200, decay="one", dtype=torch.float32)
    with torch.no_grad():
        arguments["log_decay"][:, ::7] = -1e4
    got = results(arguments)
    assert_same(got, results(widened(arguments)), 1e-3)
    arguments["log_decay"] = torch.full((1, 200, 1), -1e5)
    y, _ = ssd(**arguments)
    own = arguments["dt"][..., None] * arguments["x"] * (arguments["B"] * arguments["C"]).sum(-1, keepdim=True)
    torch.testing.assert_close(y, own)


def test_dtypes() -> None:
    arguments = draw(dtype=torch.bfloat16)
    y, state = ssd(**arguments)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert_same({"y": y, "state": state}, dict(zip(("y", "state"), ssd(**widened(arguments)), strict=True)), 1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = ssd(**draw(dtype=torch.float32))
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert ssd(**draw())[1].dtype == torch.float64


def test_float32() -> None:
    arguments = draw(dtype=torch.float32)
    assert_same(results(arguments), results(widened(arguments)), 1e-5)


def test_same_as_the_authors_reference() -> None:
    combined = pytest.importorskip("mamba_ssm.ops.triton.ssd_combined")
    a = draw(T=128, G=2, dtype=torch.float32)
    expected = combined.ssd_chunk_scan_combined_ref(a["x"], a["dt"], a["A"], a["B"], a["C"], 32)
    assert relative_error(ssd(**a)[0], expected) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 9, 4)}, r"x must have shape \[B, T, H, P\]"),
        ({"dt": torch.ones(2, 9, 3)}, r"dt must have shape \[B, T, H\] = \[2, 9, 4\], not \[2, 9, 3\]"),
        ({"B": torch.ones(2, 9, 1, 4)}, "C must have shape"),
        ({"B": torch.ones(2, 9, 3, 5), "C": torch.ones(2, 9, 3, 5)}, "4 heads cannot share 3 groups"),
        ({"B": torch.ones(2, 9, 1, 5).half()}, "must be of dtype torch.float"),
        ({"A": torch.ones(3)}, r"A must have shape \[H\] = \[4\], not \[3\]"),
        ({"log_decay": torch.ones(2, 9, 1)}, "two ways to decay"),
        ({"A": None, "log_decay": torch.ones(2, 9, 2)}, r"log_decay must have shape \[B, T, H\] = \[2, 9, 4\]"),
        ({"initial_state": torch.ones(2, 4, 6, 5)}, r"\[rows, H, N, P\] = \[2, 4, 5, 6\]"),
        ({"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}, "cu_seqlens needs B = 1"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ssd(**{**draw(T=9, dtype=torch.float32), **change})


def test_refusals_of_the_authors_kernels() -> None:
    arguments = draw(1, 9, dtype=torch.float32)
    with pytest.raises(UserError, match="'mamba_ssm' cannot run this: it takes no packed documents"):
        ssd(**arguments, cu_seqlens=torch.tensor([0, 9], dtype=torch.int32), backend="mamba_ssm")
    with pytest.raises(UserError, match="'mamba_ssm' cannot run this: it takes no log_decay"):
        ssd(**draw(1, 9, decay="one", dtype=torch.float32), backend="mamba_ssm")
    with pytest.raises(UserError, match=r"cannot run this: (it is not installed|the tensors are on cpu)"):
        ssd(**arguments, backend="mamba_ssm")


CUDA_SHAPE = {"B": 2, "T": 600, "H": 4, "P": 64, "N": 128}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "mamba_ssm"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-3)])
def test_on_cuda(backend: Any, decay: str, groups: int, dtype: torch.dtype, tolerance: float) -> None:
    compare_on_cuda(backend, decay, groups, dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("decay", "groups", "dtype", "tolerance"),
    [
        ("full", 2, torch.bfloat16, 1e-2),
        ("one", 1, torch.bfloat16, 1e-2),
        ("none", 1, torch.bfloat16, 1e-2),
        ("full", 1, torch.float32, TF32_TOLERANCE),
    ],
)
def test_fla_on_cuda(decay: str, groups: int, dtype: torch.dtype, tolerance: float) -> None:
    """One case for each way to call fla's kernels; each case compiles them again."""
    compare_on_cuda("fla", decay, groups, dtype, tolerance)


def compare_on_cuda(backend: Any, decay: str, groups: int, dtype: torch.dtype, tolerance: float) -> None:
    """Outputs and gradients of `backend` against the float64 reference."""
    pytest.importorskip(backend)
    if backend == "mamba_ssm" and decay == "one":
        pytest.skip("takes no log_decay")
    arguments = draw(**CUDA_SHAPE, G=groups, decay=decay, dtype=dtype, device="cuda")
    torch.manual_seed(0)
    state = torch.randn(2, 4, 128, 64, device="cuda", requires_grad=True)
    got = results(arguments, initial_state=state, backend=backend)
    wide = state.detach().double().requires_grad_()
    want = results(widened(arguments), initial_state=wide, backend="reference")
    plain = functools.partial(as_fla_in_tf32, arguments, initial_state=state)
    assert_same(got, want, tolerance, plain if backend == "fla" and dtype == torch.float32 else None)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "decay", "tolerance"), [*(("triton", decay, 1e-3) for decay in DECAYS), ("fla", "full", TF32_TOLERANCE)]
)
def test_packed_on_cuda(backend: Any, decay: str, tolerance: float) -> None:
    pytest.importorskip(backend)
    arguments = draw(**{**CUDA_SHAPE, "B": 1}, decay=decay, dtype=torch.float32, device="cuda")
    borders = torch.tensor([0, 5, 260, 600], dtype=torch.int32, device="cuda")
    got = results(arguments, cu_seqlens=borders, backend=backend)
    want = results(widened(arguments), cu_seqlens=borders, backend="reference")
    plain = functools.partial(as_fla_in_tf32, arguments, cu_seqlens=borders)
    assert_same(got, want, tolerance, plain if backend == "fla" else None)


@pytest.mark.gpu
@pytest.mark.usefixtures("most_gpu_memory")
@pytest.mark.parametrize("backend", ["triton", "fla", "mamba_ssm"])
def test_long_sequences_on_cuda(backend: Any) -> None:
    pytest.importorskip(backend)
    length = 100_000
    arguments = draw(1, length, 12, 64, N=128, dtype=torch.bfloat16, device="cuda")
    found = results(arguments, backend=backend)
    assert all(tensor.isfinite().all() for tensor in found.values())
    state = None
    for piece in (slice(0, length // 2), slice(length // 2, length)):
        half: dict[str, Any] = {name: t if name == "A" else t[:, piece].detach() for name, t in arguments.items()}
        y, state = ssd(**half, initial_state=state, backend=backend)
    assert state is not None
    assert relative_error(state, found["state"]) < 1e-2
    assert relative_error(y, found["y"][:, length // 2 :]) < 1e-2
