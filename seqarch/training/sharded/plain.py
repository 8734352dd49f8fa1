"""A checkpoint as plain values, which JSON holds, and tensors."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from seqarch.errors import UserError

_TENSOR, _TUPLE, _PAIRS = "$tensor", "$tuple", "$pairs"
_SCALAR = (bool, int, float, str, type(None))


def split(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON holds it. Its tensors go to `tensors`, under their `place` in the checkpoint.

    Raises:
        UserError: it holds something else than tensors, plain values, and mappings, lists and tuples of them.
    """
    if isinstance(value, Tensor):
        while place in tensors:  # a key holds a slash
            place += "/"
        tensors[place] = value
        return {_TENSOR: place}
    if isinstance(value, Mapping):
        pairs = [[_key(key, place), split(each, f"{place}/{key}", tensors)] for key, each in value.items()]
        return dict(pairs) if all(isinstance(key, str) and key[:1] != "$" for key in value) else {_PAIRS: pairs}
    if isinstance(value, list | tuple):
        each = [split(each, f"{place}/{number}", tensors) for number, each in enumerate(value)]
        return each if isinstance(value, list) else {_TUPLE: each}
    return _key(value, place)


def _key(value: Any, place: str) -> Any:
    if not isinstance(value, _SCALAR):
        raise UserError(f"checkpoint.sharded saves tensors and plain values, but {place} is a {type(value).__name__}")
    return value


def join(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The value that `split` was given; `tensor` gives a tensor by its place."""
    if isinstance(value, list):
        return [join(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensor(value[_TENSOR])
    if _TUPLE in value:
        return tuple(join(each, tensor) for each in value[_TUPLE])
    pairs = value.get(_PAIRS, value.items())
    return {key: join(each, tensor) for key, each in pairs}
