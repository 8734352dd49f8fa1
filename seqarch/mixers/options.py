"""Constructors that pass arguments to their parent's constructor, without listing them again."""

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, get_type_hints

PASSED = {Parameter.VAR_POSITIONAL: Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_KEYWORD: Parameter.KEYWORD_ONLY}
"""The parameters of the parent that `*place` and `**options` stand for."""


def with_options_of(parent: type, *, without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Any]:
    """Decorator for an `__init__` with `**options`, and perhaps `*place`, that go to the `__init__` of `parent`.

    Recipes, `seqarch mixers` and the exam read options from signatures. The decorated constructor has the keyword-only
    parameters of the parent's in place of `**options`, except for those that it has itself and those in `without`. In
    place of `*place` it has the others: `d_model`, `layer_idx` and `n_layers` of a mixer.
    """

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        own = _typed(init)
        of_parent = [each for name, each in _typed(parent.__init__).items() if name not in {*own, *without}]
        kept = [each for each in own.values() if each.kind not in PASSED]
        for passed in own.values():
            kept += [each for each in of_parent if each.kind is PASSED.get(passed.kind)]
        kept.sort(key=lambda each: (each.kind, each.default is not each.empty))  # required options first
        signature = inspect.Signature(kept)

        def checked(self: Any, *args: Any, **options: Any) -> None:
            signature.bind(self, *args, **options)  # an unknown option is a TypeError, as with any function
            init(self, *args, **options)

        checked.__name__, checked.__qualname__, checked.__doc__ = "__init__", init.__qualname__, init.__doc__
        checked.__module__ = init.__module__
        checked.__annotations__ = {each.name: each.annotation for each in kept if each.annotation is not each.empty}
        checked.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        return checked

    return decorate


def _typed(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters of a function with types in place of their names, which another module may not know."""
    types = get_type_hints(function, include_extras=True)
    return {
        name: parameter.replace(annotation=types.get(name, parameter.empty))
        for name, parameter in inspect.signature(function).parameters.items()
    }
