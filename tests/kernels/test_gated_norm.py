"""Mamba-2's gated norm: the reference against its definition, the kernels under Triton's interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import gated_rms_norm
from tests.kernels import naive

interpreted = pytest.mark.usefixtures("interpreter", "poison")
NAMES = ("y", "x", "D", "z", "weight")


def draw(B: int, T: int, H: int, P: int, *, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors, all with gradients; x and z are slices of wider ones."""
    generator = torch.Generator().manual_seed(B + T + H + P)
    shapes = {"y": (B, T, H, P), "x": (B, T, H * P + 8), "D": (H,), "z": (B, T, H * P + 16), "weight": (H * P,)}
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    single = torch.promote_types(dtype, torch.float32)
    return {n: t.to(device, single if n in ("D", "weight") else dtype).requires_grad_() for n, t in drawn.items()}


def run(leaves: dict[str, Tensor], **options: Any) -> Tensor:
    shape = leaves["y"].shape
    width = shape[2] * shape[3]
    x, z = leaves["x"][..., :width].view(shape), leaves["z"][..., 16:]
    return gated_rms_norm(leaves["y"], x, leaves["D"], z, leaves["weight"], **options)


def compare(leaves: dict[str, Tensor], *, ratio: float, **options: Any) -> None:
    """Output and all gradients of the kernels against the reference in float64."""
    wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    found = run(leaves, backend="triton", **options)
    expected = run(wide, backend="reference", **options)
    naive.assert_close(found, expected, ratio)
    dout = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(found)
    pairs = zip(
        torch.autograd.grad(found, list(leaves.values()), dout),
        torch.autograd.grad(expected, list(wide.values()), dout.double()),
        strict=True,
    )
    for name, (a, b) in zip(leaves, pairs, strict=True):
        assert a.dtype == leaves[name].dtype
        naive.assert_close(a, b, ratio, name=name)


@pytest.mark.parametrize("n_groups", [1, 2, 4])
def test_definition(n_groups: int) -> None:
    leaves = draw(2, 5, 4, 6, dtype=torch.float64)
    y, D, weight = leaves["y"], leaves["D"], leaves["weight"]
    x, z = leaves["x"][..., :24].view(y.shape), leaves["z"][..., 16:]
    gated = (y + D[:, None] * x).flatten(2) * F.silu(z)
    normed = F.rms_norm(gated.unflatten(-1, (n_groups, -1)), (24 // n_groups,), eps=0.1).flatten(2)
    torch.testing.assert_close(run(leaves, eps=0.1, n_groups=n_groups), normed * weight)


@interpreted
@pytest.mark.parametrize(("B", "T", "H", "P", "n_groups"), [(2, 5, 4, 6, 1), (1, 3, 4, 8, 2), (2, 1, 3, 5, 3)])
def test_same_as_the_reference(B: int, T: int, H: int, P: int, n_groups: int) -> None:
    compare(draw(B, T, H, P, dtype=torch.float32), ratio=2e-6, n_groups=n_groups)


@interpreted
def test_programs_take_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from seqarch.kernels.gated_norm import triton

    monkeypatch.setattr(triton, "PROGRAMS", 3)
    compare(draw(2, 5, 2, 8, dtype=torch.float32), ratio=2e-6)


@interpreted
def test_strides_of_any_kind() -> None:
    """Strides that the kernels must take: a shared weight, heads in another order, the gradient of a sum."""
    y, x = torch.randn(2, 5, 8, 3).transpose(2, 3), torch.randn(2, 5, 3, 8)
    z, D, weight = torch.randn(2, 5, 48)[..., ::2], torch.randn(1).expand(3), torch.randn(48)[::2]
    leaves = [t.requires_grad_() for t in (y, x, D, z, weight)]
    found, expected = (gated_rms_norm(*leaves, backend=backend) for backend in ("triton", "reference"))
    naive.assert_close(found, expected, 2e-6)
    pairs = zip(*(torch.autograd.grad(out.sum(), leaves) for out in (found, expected)), strict=True)
    for name, (a, b) in zip(NAMES, pairs, strict=True):
        naive.assert_close(a, b, 2e-6, name=name)


@interpreted
def test_half_precision() -> None:
    compare(draw(1, 7, 2, 16, dtype=torch.float16), ratio=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(1, 5, 4, 3)}, r"y must have shape \[B, T, H, P\] = \[1, 5, 4, 2\]"),
        ({"D": torch.zeros(3)}, r"D must have shape \[H\] = \[4\], not \[3\]"),
        ({"z": torch.zeros(1, 5, 4)}, r"z must have shape \[B, T, H P\] = \[1, 5, 8\], not \[1, 5, 4\]"),
        ({"weight": torch.zeros(2)}, r"weight must have shape \[H P\] = \[8\], not \[2\]"),
        ({"n_groups": 3}, "4 heads cannot share 3 groups"),
        ({"z": torch.zeros(1, 5, 8).half()}, "z must be of dtype torch.float32 on cpu, not torch.float16"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
        ({"backend": "triton"}, "the tensors are on cpu, not on a CUDA device"),
    ],
)
def test_refusals(change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = {name: torch.zeros(1, 5, 4, 2) for name in ("y", "x")} | {"D": torch.zeros(4)}
    arguments |= {"z": torch.zeros(1, 5, 8), "weight": torch.zeros(8)}
    with pytest.raises(UserError, match=message):
        gated_rms_norm(**{**arguments, **change})


def test_what_the_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match="it does not take float64"):
        run(draw(1, 2, 2, 4, dtype=torch.float64), backend="triton")
    with pytest.raises(UserError, match="groups of 16400 channels are more than it holds, 16384"):
        run(draw(1, 2, 1, 16400, dtype=torch.float32), backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "ratio"), [(torch.bfloat16, 5e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("H", "P", "n_groups"), [(24, 64, 1), (64, 64, 1), (6, 20, 2)])
def test_on_cuda(dtype: torch.dtype, ratio: float, H: int, P: int, n_groups: int) -> None:
    compare(draw(2, 700, H, P, dtype=dtype, device="cuda"), ratio=ratio, n_groups=n_groups)


@pytest.mark.gpu
def test_compiled_on_cuda() -> None:
    leaves = draw(2, 300, 4, 16, dtype=torch.bfloat16, device="cuda")
    dout = torch.randn(2, 300, 64, device="cuda").bfloat16()
    compiled = torch.compile(run, fullgraph=True)
    found = [torch.autograd.grad(f(leaves), list(leaves.values()), dout) for f in (compiled, run)]
    for name, a, b in zip(leaves, *found, strict=True):
        naive.assert_close(a, b, 1e-2, name=name)
