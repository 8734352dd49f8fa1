"""Our kernels of Mamba-2's recurrence under Triton's interpreter; tests marked gpu are in test_ssd.py.

The interpreter's bf16 products are wrong, so float32 and float16 stand in.
"""

from __future__ import annotations

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels import ssd
from seqarch.testing.compare import relative_error
from tests.kernels.inputs import ssd as draw
from tests.kernels.test_ssd import DECAYS, assert_same, results, widened

pytestmark = pytest.mark.usefixtures("interpreter", "poison")

SEVERAL, SHORT = (1, 33, 4, 24, 2, 20), (1, 2, 2, 16, 1, 16)
"""Batch, length, heads, width, groups and size."""


@pytest.mark.parametrize(
    ("shape", "decay"),
    [
        pytest.param((2, 70, 3, 16, 1, 16), "full", marks=pytest.mark.no_cover),
        *((SEVERAL, decay) for decay in ("one", "full")),
        *((SHORT, decay) for decay in DECAYS),
        pytest.param((1, 64, 2, 80, 2, 130), "none", marks=pytest.mark.no_cover),
    ],
)
def test_same_as_the_reference(shape: tuple[int, ...], decay: str) -> None:
    batch, _, heads, width, _, size = shape
    arguments = draw(*shape, decay=decay, dtype=torch.float32)
    torch.manual_seed(0)
    initial = torch.randn(batch, heads, size, width, requires_grad=True)
    wide = initial.detach().double().requires_grad_()
    got = results(arguments, initial_state=initial, backend="triton")
    assert_same(got, results(widened(arguments), initial_state=wide, backend="reference"), 5e-5)


@pytest.mark.parametrize(("shape", "decay"), [(SHORT, "full"), (SHORT, "one"), (SEVERAL, "none")])
def test_without_an_initial_state(shape: tuple[int, ...], decay: str) -> None:
    arguments = draw(*shape, decay=decay, dtype=torch.float32)
    got = results(arguments, backend="triton")
    assert_same(got, results(widened(arguments), backend="reference"), 5e-5)


@pytest.mark.parametrize(
    "decay", [*(pytest.param(decay, marks=pytest.mark.no_cover) for decay in ("full", "one")), "none"]
)
def test_packed_documents(decay: str) -> None:
    arguments = draw(1, 100, 2, 16, 1, 16, decay=decay, dtype=torch.float32)
    borders = torch.tensor([0, 1, 34, 34, 66, 100], dtype=torch.int32)
    torch.manual_seed(0)
    initial = torch.randn(5, 2, 16, 16, requires_grad=True)
    wide = initial.detach().double().requires_grad_()
    got = results(arguments, initial_state=initial, cu_seqlens=borders, backend="triton")
    want = results(widened(arguments), initial_state=wide, cu_seqlens=borders, backend="reference")
    assert_same(got, want, 5e-5)


def test_half_precision() -> None:
    arguments = draw(1, 150, 2, 16, 1, 32, dtype=torch.float16)
    assert_same(results(arguments, backend="triton"), results(widened(arguments), backend="reference"), 5e-3)


@pytest.mark.no_cover
def test_a_program_that_takes_several_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    from seqarch.kernels.ssd import triton

    arguments = draw(1, 40, 6, 16, 1, 16, dtype=torch.float32)
    want = results(widened(arguments), backend="reference")
    for enough in (1, 4):
        monkeypatch.setattr(triton, "ENOUGH_PROGRAMS", enough)
        assert_same(results(arguments, backend="triton"), want, 5e-5)


def test_strong_decays_and_views() -> None:
    """Decays that underflow, and B and C that are slices of one wider tensor."""
    arguments = draw(1, 70, 2, 16, 1, 16, decay="one", dtype=torch.float32)
    torch.manual_seed(0)
    joined = torch.randn(1, 70, 40, requires_grad=True)
    with torch.no_grad():
        arguments["log_decay"][:, ::7] = -300.0
    slices = [joined[..., 4:20].unflatten(-1, (1, 16)), joined[..., 20:36].unflatten(-1, (1, 16))]
    del arguments["B"], arguments["C"]
    found = []
    for backend in ("triton", "reference"):
        y, _ = ssd(**arguments, B=slices[0], C=slices[1], backend=backend)  # pyright: ignore[reportArgumentType]
        found.append((y, *torch.autograd.grad(y.square().sum(), [joined, arguments["log_decay"]])))
    for got, want in zip(*found, strict=True):
        assert relative_error(got, want) < 1e-3


def test_inputs_that_it_does_not_take() -> None:
    with pytest.raises(UserError, match="takes N up to 256 and P up to 128, not 300 and 16"):
        ssd(**draw(1, 4, 1, 16, 1, 300, dtype=torch.float32), backend="triton")
    with pytest.raises(UserError, match="'triton' cannot run this: it does not take float64"):
        ssd(**draw(1, 4), backend="triton")


PAIRS, PIECES = (2, 203, 2, 16, 1, 16), (1, 139, 2, 24, 1, 20)
"""Shapes of seven chunks, of which three pieces are made, and of five chunks for as many pieces as there may be."""


@pytest.mark.parametrize(
    ("shape", "programs", "decay", "from_zero"),
    [
        (PAIRS, 12, "full", False),
        (PAIRS, 12, "none", True),
        (PIECES, 1000, "none", False),
        (PIECES, 1000, "full", True),
    ],
)
def test_rows_in_pieces(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], programs: int, decay: str, from_zero: bool
) -> None:
    """Rows are cut if few programs would walk them, into pieces of several sizes."""
    from seqarch.kernels.ssd import triton

    monkeypatch.setattr(triton, "USUAL", triton.USUAL._replace(rows=16))
    monkeypatch.setattr(triton, "ENOUGH_WALKS", programs)
    monkeypatch.setattr(triton, "SHORTEST_PIECE", 2)
    batch, _, heads, width, _, size = shape
    arguments = draw(*shape, decay=decay, dtype=torch.float32)
    torch.manual_seed(0)
    initial = None if from_zero else torch.randn(batch, heads, size, width, requires_grad=True)
    wide = None if initial is None else initial.detach().double().requires_grad_()
    got = results(arguments, initial_state=initial, backend="triton")
    assert_same(got, results(widened(arguments), initial_state=wide, backend="reference"), 5e-5)


@pytest.mark.parametrize(
    ("decay", "documents"), [("full", False), ("full", True), ("one", True), ("none", False), ("none", True)]
)
def test_chunks_of_two_sizes(monkeypatch: pytest.MonkeyPatch, decay: str, documents: bool) -> None:
    """On Hopper the passes have chunks of their own sizes."""
    from seqarch.kernels.ssd import triton

    monkeypatch.setattr(triton, "tuning_of", lambda *_: triton.FASTEST)
    arguments = draw(1, 200, 2, 16, 1, 20, decay=decay, dtype=torch.float32)
    borders = torch.tensor([0, 1, 34, 34, 200], dtype=torch.int32) if documents else None
    got = results(arguments, cu_seqlens=borders, backend="triton")
    assert_same(got, results(widened(arguments), cu_seqlens=borders, backend="reference"), 5e-5)
