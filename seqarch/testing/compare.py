"""Comparisons with strict bounds that say where tensors differ, and memory that is never zero by chance."""

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.tables import ranges_of

AXES = ("row", "position", "channel")


def relative_error(actual: Tensor, expected: Tensor, least: float = 1e-3) -> float:
    """Root mean square of the difference over that of `expected`, which counts as `least` where it is less."""
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return (difference / expected.double().square().mean().sqrt().clamp_min(least)).item()


def assert_near(
    name: str,
    actual: Tensor,
    expected: Tensor,
    tolerance: float,
    axes: tuple[str, ...] | None = AXES,
    least: float = 1e-3,
) -> None:
    """Assert that the shapes are equal and that `relative_error` is at most `tolerance`."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    error = relative_error(actual, expected, least)
    assert error <= tolerance, _difference(name, error, tolerance, actual, expected, axes)


assert_close: Any = functools.partial(assert_near, least=1.0)
"""Assert that the RMS of the difference is at most a tolerance, times the RMS of what is expected if that exceeds 1."""


def assert_all_close(name: str, actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """`assert_close` for outputs and gradients by name; a missing gradient counts as zero."""
    for key in sorted(actual.keys() | expected.keys(), key=lambda key: key != "output"):
        zero = torch.zeros_like(expected[key] if key in expected else actual[key])
        assert_close(f"{name}: {key}", actual.get(key, zero), expected.get(key, zero), tolerance, axes_of(key))


def axes_of(key: str) -> tuple[str, ...] | None:
    """The names of the axes of an output or gradient; `None` for the gradient of a parameter."""
    return AXES if key in ("output", "gradient of x") else None


def _difference(
    name: str, error: Any, bound: Any, actual: Tensor, expected: Tensor, axes: tuple[str, ...] | None
) -> str:
    """The error, the bound, the largest difference with its place and, along a sequence, the first wrong position."""
    message = f"{name}: off by {error:.3g}, more than {bound:.3g}"
    if not actual.dim():
        return message
    difference = (actual.double() - expected.double()).abs().nan_to_num(nan=math.inf)
    index = [int(each) for each in torch.unravel_index(difference.argmax(), difference.shape)]
    place = ", ".join(f"{axis} {each}" for axis, each in zip(axes, index, strict=True)) if axes else str(index)
    message += f"\nlargest at {place}: {actual[*index]:.9g}, not {expected[*index]:.9g}"
    if axes:
        wrong = (difference >= 1e-3 * difference.max()).transpose(0, axes.index("position")).flatten(1).any(1)
        ranges = ranges_of(wrong.nonzero().flatten().tolist())
        message += f"\nwrong positions: {', '.join(ranges[:5])}{' and others' if len(ranges) > 5 else ''}"
    if expected.dtype == torch.float64 and relative_error(actual, expected) < 1e-5:
        message += "\nso small an error means that something in float64 is rounded to float32"
    return message


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` and its like give NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            settings.fill_uninitialized_memory = fill


def refuses(what: str, function: Any, *args: Any, **options: Any) -> None:
    with contextlib.suppress(UserError):
        function(*args, **options)
        raise AssertionError(f"{what} is not refused with a UserError")
