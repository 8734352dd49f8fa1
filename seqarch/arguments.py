"""Checks the types of what a Python user gives to the public functions."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

import numpy as np

from seqarch.errors import UserError

Function = TypeVar("Function", bound=Callable[..., Any])
MODULES = re.compile(r"\b(\w+\.)+(?=[A-Z])")
WIDER = {bool: bool | np.bool_, int: Integral, float: Real, Path: os.PathLike}
"""What also counts as a type: NumPy's numbers, other libraries' paths."""


class WrongType(UserError, TypeError):
    """An argument has another type than the function takes."""


def typed(function: Function) -> Function:
    """Decorator: raise `WrongType` for arguments that do not have the annotated types, before anything is done."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for name, value in signature.bind(*args, **options).arguments.items():
            hint = signature.parameters[name].annotation
            if not _fits(value, hint):
                words = hint.__name__ if isinstance(hint, type) else MODULES.sub("", str(hint))
                raise WrongType(f"{name} must be {words}, not {value!r:.80}")
        return function(*args, **options)

    return call  # pyright: ignore[reportReturnType]


def _fits(value: Any, hint: Any) -> bool:
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:
        return any(_fits(value, each) for each in inside)
    if kind is None:
        return value is None
    if not isinstance(kind, type) or kind is inspect.Parameter.empty or getattr(kind, "_is_protocol", False):
        return True  # `Any`, a name, or what has no instances
    if not inside or issubclass(kind, Mapping):
        return isinstance(getattr(value, "_orig_mod", value), WIDER.get(kind, kind))  # that of `torch.compile`, too
    return isinstance(value, Iterable) and (
        not isinstance(value, list | tuple) or all(_fits(e, inside[0]) for e in value)
    )
