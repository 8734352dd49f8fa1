"""Comparisons with strict bounds, and memory that is never zero by chance."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of `expected`."""
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return (difference / expected.double().square().mean().sqrt().clamp_min(1e-3)).item()


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Assert that the RMS of the difference is at most `tolerance`, times the RMS of `expected` if that exceeds 1."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    bound = tolerance * expected.double().square().mean().sqrt().clamp_min(1.0)
    assert difference <= bound, f"{name}: off by {difference:.3g}, more than {bound:.3g}"


def assert_all_close(name: str, actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """`assert_close` for outputs and gradients by name; a missing gradient counts as zero."""
    for key in actual.keys() | expected.keys():
        zero = torch.zeros_like(expected[key] if key in expected else actual[key])
        assert_close(f"{name}: {key}", actual.get(key, zero), expected.get(key, zero), tolerance)


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
