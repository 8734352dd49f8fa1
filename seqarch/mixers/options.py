"""Constructors that pass options to their parent's constructor, without listing them again."""

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def with_options_of(parent: type, *, without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Any]:
    """Decorator for an `__init__` with `**options` that go to the `__init__` of `parent`.

    Recipes, `seqarch mixers` and the exam read options from signatures. The decorated constructor has the keyword-only
    parameters of the parent's in place of `**options`, except for those that it has itself and those in `without`.
    """

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        own = _typed(init)
        kept = [each for each in own.values() if each.kind is not each.VAR_KEYWORD]
        names = {*own, *without}
        kept += [
            each
            for each in _typed(parent.__init__).values()
            if each.kind is each.KEYWORD_ONLY and each.name not in names
        ]
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


def _typed(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function with types in place of their names, which another module may not know."""
    types = get_type_hints(function, include_extras=True)
    return {
        name: parameter.replace(annotation=types.get(name, parameter.empty))
        for name, parameter in inspect.signature(function).parameters.items()
    }
