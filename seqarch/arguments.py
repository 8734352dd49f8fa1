"""Checks arguments by their annotations: types, for what a Python user gives, and limits of numbers."""

import abc
import dataclasses
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sized
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from seqarch.errors import UserError, one_of

Function = TypeVar("Function", bound=Callable[..., Any])
MODULES = re.compile(r"\b(\w+\.)+(?=[A-Z])")
WIDER = {bool: bool | np.bool_, int: Integral, float: Real, Path: os.PathLike}
"""What also counts as a type: NumPy's numbers, other libraries' paths."""
LARGEST = 2**63 - 1


class WrongType(UserError, TypeError):
    """An argument has another type than the function takes."""


class Limit(abc.ABC):
    """What an option takes, as part of its annotation: `Annotated[list[int], FILLED]`."""

    @abc.abstractmethod
    def check(self, name: str, value: Any) -> None:
        """Raise `UserError` for a value outside; None, a default, passes."""


class Filled(Limit):
    """A text, list or mapping that is not empty."""

    def check(self, name: str, value: Any) -> None:
        if isinstance(value, Sized) and not len(value):
            raise UserError(f"{name} is empty: give it a value")


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Interval(Limit):
    """The numbers that an option takes, as part of its annotation: `Annotated[float, Interval(0, 1, "(]")]`.

    Args:
        low: the lower end.
        high: the upper end.
        ends: a round bracket excludes an end, as in mathematics.
    """

    low: float
    high: float = math.inf
    ends: str = "[)"

    def __contains__(self, number: Any) -> bool:
        above = number >= self.low if self.ends[0] == "[" else number > self.low
        return above and (number <= self.high if self.ends[1] == "]" else number < self.high)

    def __repr__(self) -> str:
        if self.high >= LARGEST:
            return f"at least {self.low}" if self.ends[0] == "[" else f"above {self.low}" if self.low else "positive"
        both = zip((self.low, self.high), self.ends, strict=True)
        excluded = [str(end) for end, bracket in both if bracket in "()"]
        return f"in {self.low}..{self.high}" + (f", {' and '.join(excluded)} excluded" if excluded else "")

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, int | float | np.number) or (value in self and not isinstance(value, bool)):
            return
        most = f", and at most {self.high:,}" if LARGEST <= self.high < value else ""
        most = most if -math.inf < value < math.inf else ", and finite"
        raise UserError(f"{name} must {'be' if self.high >= LARGEST else 'lie'} {self}{most}, not {value}")


COUNT, SEED, FILLED = Interval(1, LARGEST, "[]"), Interval(0, 2**32 - 1, "[]"), Filled()
Count = Annotated[int, COUNT]
"""At least 1, and not too large for a tensor."""
Positive = Annotated[float, Interval(0, math.inf, "()")]
Steps = Annotated[int, Interval(0)]
Share = Annotated[float, Interval(0, 1, "(]")]
Seed = Annotated[int, SEED]
"""What every generator of random numbers takes."""


def divide(**sizes: float) -> int:
    """The first of two named sizes over the second, which must divide it: `divide(d_model=64, n_heads=4)`."""
    (whole, total), (part, count) = sizes.items()
    if count < 1 or total % count:
        raise UserError(f"{part}={count} does not divide {whole}={total:.15g}: change one of them")
    return int(total // count)


def typed(function: Function) -> Function:
    """Decorator: raise `WrongType` for arguments that do not have the annotated types, before anything is done."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for name, value in signature.bind(*args, **options).arguments.items():
            hint = signature.parameters[name].annotation
            if not _fits(value, hint):
                raise WrongType(f"{name} must be {' | '.join(map(_in_words, kinds_of(hint)))}, not {value!r:.80}")
            check_limits(name, value, hint)
        return function(*args, **options)

    return call  # pyright: ignore[reportReturnType]


class Limited:
    """A class whose constructor, and those of subclasses, refuse what lies outside of the annotated limits.

    These are a `Limit`, such as an `Interval` of numbers, and the words of a `Literal`.
    """

    option_prefix: ClassVar[str] = ""
    """What messages write before the name of an option; `{}` is the name of the class."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """Options by names that they had in earlier versions; recipes, runs and checkpoints may still use these."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if init := vars(cls).get("__init__"):
            setattr(cls, "__init__", _limited(init))  # noqa: B010 - pyright takes no other method


def _limited(init: Callable[..., None]) -> Callable[..., None]:
    written = {name: each.annotation for name, each in inspect.signature(init).parameters.items()}

    @functools.cache
    def hints() -> dict[str, Any]:
        try:
            return {**written, **get_type_hints(init, include_extras=True)}  # also of annotations that are texts
        except NameError:  # a name that only a type checker imports
            return written

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        prefix = self.option_prefix.format(type(self).__name__)
        for name, value in {**dict(zip(written, (self, *args), strict=False)), **options}.items():
            _check_choice(prefix + name, value, hints().get(name))
            check_limits(prefix + name, value, hints().get(name))
        init(self, *args, **options)

    may_refuse = (isinstance(hint, str) or choices_of(parts_of(hint)) or has_limits(hint) for hint in written.values())
    return checked if any(may_refuse) else init


def check_fields(self: Any) -> None:
    """Raise `UserError` for a field of a dataclass that lies outside of the annotated limits."""
    for name, hint in get_type_hints(type(self), include_extras=True).items():
        check_limits(name, getattr(self, name), hint)


def check_limits(name: str, value: Any, hint: Any) -> None:
    """Raise `UserError` for a value outside of its `Limit`, also inside a list or mapping."""
    for kind in parts_of(hint):
        inside = get_args(kind)
        if get_origin(kind) is Annotated:
            for limit in inside[1:]:
                limit.check(name, value)
            check_limits(name, value, inside[0])
        elif isinstance(value, Mapping) and len(inside) == 2:
            for key, part in value.items():
                check_limits(f"{name}.{key}", part, inside[1])
        elif isinstance(value, list | tuple) and inside:
            for part in value:
                check_limits(name, part, inside[0])


def _check_choice(name: str, value: Any, hint: Any) -> None:
    choices = [str(choice) for choice in choices_of(parts_of(hint))]
    if isinstance(value, str) and choices and str not in kinds_of(hint):
        choices += ["null"] * (NoneType in kinds_of(hint))
        if value not in choices:
            raise UserError(f"{name} must be {one_of(choices)}, not {value}")


@functools.cache
def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type, without limits of numbers."""
    return tuple(get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in parts_of(hint))


@functools.cache
def has_limits(hint: Any) -> bool:
    """Whether a type has a `Limit`, or one inside has."""
    inside = get_args(hint)
    if get_origin(hint) is Annotated and isinstance(inside[1], Limit):
        return True
    return any(has_limits(kind) for kind in inside if isinstance(kind, Hashable))


def choices_of(kinds: Iterable[Any]) -> list[Any]:
    """The values that the `Literal`s among the types name."""
    return [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]


def parts_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _in_words(kind: Any) -> str:
    if kind is NoneType:
        return "None"
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else MODULES.sub("", str(kind))


def _fits(value: Any, hint: Any) -> bool:
    kinds = kinds_of(hint)
    if len(kinds) != 1:
        return any(_fits(value, kind) for kind in kinds)
    kind, inside = get_origin(kinds[0]) or kinds[0], get_args(kinds[0])
    if kind is Callable:
        return callable(value)
    if not isinstance(kind, type) or kind in (Any, inspect.Parameter.empty) or getattr(kind, "_is_protocol", False):
        return True  # `Any`, a name, or what has no instances
    if not inside or issubclass(kind, Mapping):
        return isinstance(getattr(value, "_orig_mod", value), WIDER.get(kind, kind))  # that of `torch.compile`, too
    return isinstance(value, Iterable) and (
        not isinstance(value, list | tuple) or all(_fits(e, inside[0]) for e in value)
    )
