"""The Triton kernels of the selective scan under Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seqarch.errors import UserError
from seqarch.kernels import selective_scan
from tests.kernels import naive
from tests.kernels.scan_inputs import DECAYS, draw, leaves, recurrent

interpreted = pytest.mark.usefixtures("interpreter", "poison")


def compare(
    inputs: dict[str, Any], state: Tensor | None = None, *, ratio: float, expected: Any = recurrent, **options: Any
) -> None:
    """Outputs, final states and all gradients against float64, within `ratio` by norm."""
    given = leaves(inputs) + ([] if state is None else [state])
    wide_inputs = {k: None if t is None else t.detach().double().requires_grad_() for k, t in inputs.items()}
    wide_state = None if state is None else state.detach().double().requires_grad_()
    wide = leaves(wide_inputs) + ([] if wide_state is None else [wide_state])
    actual = selective_scan(**inputs, initial_state=state, backend="triton", **options)
    wanted = expected(wide_inputs, wide_state)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device) for t in wanted]
    for name, a, b in zip(("output", "final state"), actual, wanted, strict=True):
        naive.assert_close(a, b, ratio, name=name)
    got = torch.autograd.grad(actual, given, [w.to(a.dtype) for w, a in zip(weights, actual, strict=True)])
    for index, (a, b) in enumerate(zip(got, torch.autograd.grad(wanted, wide, weights), strict=True)):
        naive.assert_close(a, b, ratio, name=f"gradient {index}")


def initial(rows: int, d: int, N: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, d, N, generator=generator).to(device).requires_grad_()


@pytest.fixture
def short(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and segments of few tokens: the interpreter is slow."""
    from seqarch.kernels.selective_scan import triton as kernels

    monkeypatch.setattr(kernels, "EVERY", 4)
    monkeypatch.setattr(kernels, "MIN_SEGMENT", 8)


@interpreted
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("decay", "B", "T", "d", "N"),
    [
        *((decay, 1, 1, 32, 16) for decay in DECAYS),
        *((decay, 2, 8, 32, 4) for decay in ("full", "none")),
        *((decay, 2, 7, 5, 3) for decay in ("full", "one")),
    ],
)
def test_definition(decay: str, B: int, T: int, d: int, N: int) -> None:
    inputs = draw(B, T, d, N, decay, dtype=torch.float32)
    if T % 2:
        compare({**inputs, "D": None}, initial(B, d, N), ratio=1e-5)
    else:
        compare(inputs, ratio=1e-5)


@interpreted
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("decay", "T"), [("full", 16), ("one", 11), ("none", 11)])
def test_segments(decay: str, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences cut into segments that run at the same time."""
    from seqarch.kernels.selective_scan import triton as kernels

    monkeypatch.setattr(kernels, "PROGRAMS_PER_PROCESSOR", 2)
    assert kernels.segment_length(2, T, 32, 4) == 8
    inputs = draw(2, T, 32, 4, decay, dtype=torch.float32)
    compare(inputs, initial(2, 32, 4) if T % 2 else None, ratio=1e-5)


@interpreted
@pytest.mark.usefixtures("short")
@pytest.mark.no_cover
@pytest.mark.parametrize(("decay", "given"), [("full", True), ("one", True), ("none", False)])
def test_packed_documents(decay: str, given: bool) -> None:
    borders = torch.tensor([0, 1, 6, 6, 15, 17], dtype=torch.int32)
    inputs = draw(1, 17, 20, 4, decay, dtype=torch.float32)

    def reference(inputs: dict[str, Any], state: Tensor | None) -> tuple[Tensor, Tensor]:
        return selective_scan(**inputs, initial_state=state, cu_seqlens=borders, backend="reference")

    state = initial(5, 20, 4) if given else None
    compare(inputs, state, ratio=1e-5, expected=reference, cu_seqlens=borders)


@interpreted
def test_half_precision() -> None:
    inputs = draw(1, 12, 32, 16, "full", dtype=torch.float32)
    half = {k: t.detach().half().requires_grad_() if k in ("x", "B", "C") else t for k, t in inputs.items()}
    compare(half, ratio=3e-3)


@interpreted
def test_activation_checkpointing() -> None:
    inputs = draw(1, 6, 32, 4, "full", dtype=torch.float32)
    expected = selective_scan(**inputs, backend="reference")[0]
    again = checkpoint(lambda: selective_scan(**inputs, backend="triton")[0], use_reentrant=False)
    assert isinstance(again, Tensor)
    naive.assert_same_gradients(again, expected, leaves(inputs), 1e-5)


@interpreted
def test_strided_inputs() -> None:
    """Slices of a projection, as the mixer passes them."""
    inputs = draw(2, 8, 32, 4, "one", dtype=torch.float32)
    expected = selective_scan(**inputs, backend="reference")[0]
    joined = torch.cat([inputs[name] for name in ("x", "dt", "B", "C")], dim=-1)
    sliced = dict(zip(("x", "dt", "B", "C"), joined.split([32, 32, 4, 4], dim=-1), strict=True))
    actual = selective_scan(**{**inputs, **sliced}, backend="triton")[0]
    naive.assert_same_gradients(actual, expected, leaves(inputs), 1e-5)


@interpreted
def test_pieces_and_steps_continue() -> None:
    inputs = draw(1, 13, 32, 16, "full", dtype=torch.float32)
    whole, last = selective_scan(**inputs, backend="triton")
    outputs, state = [], None
    with torch.no_grad():
        for a, b in ((0, 7), (7, 12), (12, 13)):
            piece: dict[str, Any] = {k: t if k in ("A", "D") or t is None else t[:, a:b] for k, t in inputs.items()}
            y, state = selective_scan(**piece, initial_state=state, backend="triton")
            outputs.append(y)
    assert state is not None
    naive.assert_close(torch.cat(outputs, dim=1), whole, 1e-6)
    naive.assert_close(state, last, 1e-6)


@interpreted
@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_without_breaks() -> None:
    inputs = draw(1, 4, 32, 4, "full", dtype=torch.float32)
    compiled = torch.compile(
        lambda inputs: selective_scan(**inputs, backend="triton"), fullgraph=True, backend="aot_eager"
    )
    actual, expected = compiled(inputs), selective_scan(**inputs, backend="reference")
    naive.assert_same_gradients(actual[0] + actual[1].sum(), expected[0] + expected[1].sum(), leaves(inputs), 1e-5)


@interpreted
def test_registration() -> None:
    """The operators describe their outputs correctly to torch.compile."""
    from seqarch.kernels.selective_scan import triton as kernels

    inputs = [draw(2, 4, 32, 4, "one", dtype=torch.float32)[k] for k in ("x", "dt", "A", "B", "C", "D", "log_decay")]
    state = initial(2, 32, 4)
    torch.library.opcheck(kernels.forward, (*inputs, state, None, True), test_utils=("test_schema", "test_faketensor"))


@interpreted
@pytest.mark.parametrize("borders", [[0, 100], [0, 1, 17, 17, 60, 100], [0, 0, 100], [0, 32, 64, 100, 100]])
def test_segments_tile_the_documents(borders: list[int]) -> None:
    from seqarch.kernels.selective_scan.triton import segments_of

    found = segments_of(1, 100, 32, torch.tensor(borders, dtype=torch.int32), torch.device("cpu"))
    wanted = []
    for row, (a, b) in enumerate(itertools.pairwise(borders)):
        assert found.first[row] == len(wanted)
        wanted += [(start, min(start + 32, b), row) for start in range(a, b, 32)]
    assert found.first[-1] == len(wanted)
    triples = list(zip(found.begins.tolist(), found.ends.tolist(), found.documents.tolist(), strict=True))
    assert triples[: len(wanted)] == wanted
    assert all(a == b for a, b, _ in triples[len(wanted) :])
    slots = [begin // 16 + i + k for i, (begin, end, _) in enumerate(wanted) for k in range(-(-(end - begin) // 16))]
    assert len(set(slots)) == len(slots), "two pieces keep their state in one place"
    assert max(slots) < 100 // 16 + len(triples)


@interpreted
@pytest.mark.parametrize(
    ("dtype", "N", "message"),
    [(torch.float64, 4, "does not take float64"), (torch.float32, 65, "at most 64 states per channel, not 65")],
)
def test_what_the_kernels_cannot_do(dtype: torch.dtype, N: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        selective_scan(**draw(1, 4, 5, N, "full", dtype=dtype), backend="triton")


def on_gpu(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The inputs on the GPU; activations are in `dtype`."""
    cast = {k: t if t is None or k not in ("x", "B", "C") else t.to(dtype) for k, t in inputs.items()}
    return {k: None if t is None else t.detach().cuda().requires_grad_() for k, t in cast.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    ("B", "T", "d", "N"), [(2, 2048, 96, 16), (1, 1001, 1000, 16), (3, 130, 64, 5), (4, 1, 64, 16)]
)
def test_gpu(decay: str, dtype: torch.dtype, ratio: float, B: int, T: int, d: int, N: int) -> None:
    def reference(inputs: dict[str, Any], state: Tensor | None) -> tuple[Tensor, Tensor]:
        return selective_scan(**inputs, initial_state=state, backend="reference")

    inputs = on_gpu(draw(B, T, d, N, decay, dtype=torch.float32), dtype)
    compare(inputs, initial(B, d, N, "cuda"), ratio=ratio, expected=reference)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
def test_gpu_packed_documents(decay: str) -> None:
    borders = torch.tensor([0, 1, 700, 700, 5000, 5003], dtype=torch.int32, device="cuda")

    def reference(inputs: dict[str, Any], state: Tensor | None) -> tuple[Tensor, Tensor]:
        return selective_scan(**inputs, initial_state=state, cu_seqlens=borders, backend="reference")

    inputs = on_gpu(draw(1, 5003, 64, 16, decay, dtype=torch.float32), torch.float32)
    compare(inputs, initial(5, 64, 16, "cuda"), ratio=1e-4, expected=reference, cu_seqlens=borders)


@pytest.mark.gpu
@pytest.mark.usefixtures("most_gpu_memory")
def test_gpu_long_sequence() -> None:
    """100k tokens: finite gradients, the same bits again, and the state of two halves."""
    inputs = on_gpu(draw(1, 102400, 1536, 16, "full", dtype=torch.float32), torch.bfloat16)
    y, state = selective_scan(**inputs)
    grads = torch.autograd.grad(y.float().square().mean(), leaves(inputs))
    assert all(g.isfinite().all() for g in grads)
    again, _ = selective_scan(**inputs)
    assert torch.equal(y, again)
    for a, b in zip(torch.autograd.grad(again.float().square().mean(), leaves(inputs)), grads, strict=True):
        assert torch.equal(a, b)
    half = None
    with torch.no_grad():
        for a, b in ((0, 51201), (51201, 102400)):
            piece: dict[str, Any] = {k: t if k in ("A", "D") or t is None else t[:, a:b] for k, t in inputs.items()}
            _, half = selective_scan(**piece, initial_state=half)
    assert half is not None
    naive.assert_close(half, state, 1e-5)
