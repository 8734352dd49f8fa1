"""Finds what installed packages provide, and decides which names in files may become classes.

A recipe, a checkpoint and a run folder name classes. Such a name counts only where it leads to a class of seqarch, of a
package that declares a seqarch entry point, or of the libraries' modules in `LIBRARIES`. That is decided on the name,
before anything is imported; `--allow_code PACKAGE` adds packages for one command. A function is never called.
"""

import functools
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import Distribution, EntryPoint, EntryPoints, entry_points
from typing import Any, TypeVar

from seqarch.errors import PluginWarning, UserError, check_known, near, one_of, refused

Base = TypeVar("Base")
MIXERS = "seqarch.mixers"
GROUPS = (MIXERS, "seqarch.positions", "seqarch.tasks", "seqarch.tokenizers")
PARTS = ("callbacks", "loggers", "strategies", "plugins", "profilers", "accelerators")
LIBRARIES = (*(f"lightning.{side}.{part}" for side in ("pytorch", "fabric") for part in PARTS), "torch.optim")
"""The modules of Lightning whose classes a recipe's `trainer` names, and PyTorch's optimizers."""
FLAG = "--allow_code"
ALLOW_CODE = (
    "package whose classes the recipe or checkpoint may name, like those of seqarch and plug-ins; may be repeated"
)


@functools.cache
def _search(path: tuple[str, ...]) -> Any:
    return entry_points()


def _installed(group: str) -> EntryPoints:
    """The entry points of a group that packages on `sys.path` declare; one search finds those of all groups."""
    return _search(tuple(sys.path)).select(group=group)


@functools.cache
def name_and_version(distribution: Distribution | None) -> tuple[str, str]:
    """Name and version of an installed package; each of them reads its whole metadata."""
    return (distribution.name, distribution.version) if distribution else ("unknown", "unknown")


def entries(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, sorted; metadata only, nothing is imported.

    The first of two with one name is here. `import_entry` refuses it, so that a clash stops only what uses the name.
    """
    points: dict[str, EntryPoint] = {}
    for point in _installed(group):
        points.setdefault(point.name, point)
    return dict(sorted(points.items()))


def load(group: str, name: str, base: type[Base]) -> type[Base]:
    """Import the class that a package declares under a name.

    Raises:
        UserError: the name is unknown, or its class cannot be imported, is not a `base`, is abstract, or has another
            name.
    """
    points = entries(group)
    check_known(kind_of(group), name, points)
    return load_entry(points[name], base)


def load_entry(point: EntryPoint, base: type[Base]) -> type[Base]:
    """Import the class of an entry point; errors as those of `load`."""
    found, which = import_entry(point), named(point)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{which} is not a subclass of {base.__module__.rpartition('.')[0]}.{base.__name__}")
    if missing := _missing(found):
        raise UserError(f"{which} defines no {missing}")
    if found.__name__ != point.name:  # a recipe names the class
        raise UserError(f"{which} has another name than its class: call both {found.__name__} or {point.name}")
    return found


def import_entry(point: EntryPoint) -> Any:
    """Import what an entry point names.

    Raises:
        UserError: that raises an error, or another package declares the same name.
    """
    alike = {described(each) for each in _installed(point.group) if each.name == point.name}
    if len(alike) > 1:
        both = " and ".join(sorted(alike))
        raise UserError(f"{kind_of(point.group)} '{point.name}' is declared twice, by {both}: uninstall one of them")
    # whatever a plug-in's module raises its author must repair
    kinds = (UserError, Exception, SystemExit)
    with refused(f"{named(point)} cannot be imported", *kinds, why=lambda error: f"{type(error).__name__}: {error}"):
        return point.load()


def load_all(group: str, base: type[Base]) -> tuple[dict[str, type[Base]], dict[str, str]]:
    """Import every class of a group: those that `load` accepts by name, and by name why it refuses the others."""
    loaded: dict[str, type[Base]] = {}
    left_out: dict[str, str] = {}
    for name, point in entries(group).items():
        try:
            loaded[name] = load_entry(point, base)
        except UserError as error:  # a broken plug-in must not take every other with it
            left_out[name] = str(error)
    return loaded, left_out


def import_all(group: str, base: type[Base]) -> dict[str, type[Base]]:
    """Import every class of a group, so that a file may name it bare; warn about those that are left out."""
    loaded, left_out = load_all(group, base)
    for reason in left_out.values():
        warnings.warn(f"left out: {reason}", PluginWarning, stacklevel=3)
    return loaded


def resolve(
    path: str, base: type[Base] | tuple[type[Base], ...], allow: Collection[str] = (), words: Collection[str] = ()
) -> type[Base]:
    """The class that a name in a file means.

    Args:
        path: `module.Class`, or the bare name of a class that is imported.
        base: what the class must be, or one of several.
        allow: packages that the user allowed.
        words: what may stand in place of a class.

    Raises:
        UserError: the name may not be imported, nothing has that name, or it is not a class, not a `base`, or abstract.
    """
    bases = base if isinstance(base, tuple) else (base,)
    kind = " or ".join(each.__name__ for each in bases)
    of_bases = [{each.__name__: each for each in sorted(_subclasses(base), key=_precedence)} for base in bases]
    known = {name: each for of_base in of_bases for name, each in of_base.items()}
    if "." in path:
        check_name(path, allow)
        found = _imported(path)
        check_is_class(path, found)
        check_name(f"{found.__module__}.{found.__qualname__}", allow)  # where it stands, wherever it was found
    elif (found := known.get(path)) is None:
        right = near(path, words or [name for of_base in of_bases for name in _offered(of_base, bases)])
        raise UserError(f"there is no {'' if words else f'{kind} '}'{path}'{right}")
    if not issubclass(found, bases):
        raise UserError(f"{path} is not a {kind}")
    if (missing := _missing(found)) or _only_a_base(found, bases):
        right = near("", _offered({each.__name__: each for each in _subclasses(found)}, bases)) or ": name a subclass"
        raise UserError(f"{path} is a base class{missing and f' without {missing}'}{right}")
    return found


def _precedence(found: type) -> tuple[bool, bool]:
    """Sorts the class that a bare name means behind others of that name, whatever else has been imported."""
    return found.__module__.startswith("seqarch."), found.__module__.startswith(LIBRARIES)


def _only_a_base(found: type, bases: Collection[type]) -> bool:
    """Whether a library means the class, one of the `bases`, only to be subclassed."""
    return found in bases and found.__module__.startswith(LIBRARIES)


def _offered(known: Mapping[str, type], bases: Collection[type]) -> Collection[str]:
    """The known classes that a recipe may have meant: declared ones or, if none is, those that are not abstract."""
    declared = known.keys() & {name for group in GROUPS for name in entries(group)}
    usable = [name for name, each in known.items() if not _missing(each) and not _only_a_base(each, bases)]
    return declared or [name for name in usable if name[0] != "_"]


def _missing(kind: type) -> str:
    """The methods that a class leaves to its subclasses, in words."""
    return one_of(sorted(getattr(kind, "__abstractmethods__", ())))


def check_name(path: str, allow: Collection[str] = ()) -> None:
    """Refuse the dotted name of something that a file may not bring in; nothing is imported."""
    if not any(path.startswith(f"{package}.") for package in {*packages(), *allow}):
        allowed = f"if you trust it, add {FLAG} {path.partition('.')[0]}"
        raise UserError(f"'{path}' belongs neither to seqarch nor to an installed plug-in: {allowed}")


def check_is_class(path: str, found: Any) -> None:
    """Refuse what is not a class, such as a function."""
    if not isinstance(found, type):
        raise UserError(f"'{path}' is a {type(found).__name__}, not a class: a file may name classes only")


def packages() -> tuple[str, ...]:
    """The packages and modules whose classes a file may name."""
    plugins = {re.split(r"\W", point.value)[0] for group in GROUPS for point in _installed(group)}
    return (*sorted({"seqarch", *plugins}), *LIBRARIES)


def trust(allow: Collection[str] = ()) -> None:
    """Let jsonargparse import only what `check_name` allows, from now on, in this process.

    Raises:
        UserError: one of `allow` is not the name of a package, or is jsonargparse, which decides this itself.
    """
    from jsonargparse import set_parsing_settings

    for package in allow:
        if not all(part.isidentifier() for part in package.split(".")) or package.startswith("jsonargparse"):
            raise UserError(f"{FLAG} {package}: name a package that Python can import")
    allowed = {*packages(), *allow}
    inside = tuple(f"{package}." for package in allowed)
    still = {each for each in _allowed_before if f"{each}.".startswith(inside)}  # the longest name decides
    set_parsing_settings(
        import_path_denylist=["*", *sorted(_allowed_before - still)],
        import_path_allowlist=sorted(allowed | still),
        instantiate_subclass_spec_in_any=False,
    )
    _allowed_before.update(allowed)


_allowed_before: set[str] = set()


def check_parsed(config: Any, allow: Collection[str] = ()) -> None:
    """Refuse a parsed configuration that would call a function. Call this before anything in it is built."""
    for value in _classes_and_functions(config):
        if isinstance(value, str):
            check_name(value, allow)
            check_is_class(value, _imported(value))
        elif str(module := getattr(value, "__module__", None)).partition(".")[0] not in allow:
            check_is_class(f"{module}.{getattr(value, '__qualname__', '')}", value)


def split_allowed(args: list[str]) -> tuple[list[str], list[str]]:
    """The arguments without each `--allow_code PACKAGE`, and these packages.

    Raises:
        UserError: one of them has no value.
    """
    rest, allowed = split_flags(args, lambda flag: flag == FLAG)
    return rest, [package for _, package in allowed]


def split_flags(args: Sequence[str], wanted: Callable[[str], Any]) -> tuple[list[str], list[tuple[str, str]]]:
    """The arguments without each `--flag VALUE` or `--flag=VALUE` that is wanted, and these.

    Raises:
        UserError: one of them has no value.
    """
    rest, found = [], []
    words = iter(args)
    for word in words:
        flag, equals, value = word.partition("=")
        if not wanted(flag):
            rest.append(word)
            continue
        if not equals and (value := next(words, "--")).startswith("--"):
            raise UserError(f"{flag} needs a value")
        found.append((flag, value))
    return rest, found


def allow_flags(allow: Collection[str]) -> list[str]:
    """Packages that are allowed as another process takes them."""
    return [f"{FLAG}={package}" for package in allow]


def kind_of(group: str) -> str:
    """The kind of an entry point of the group: "mixer" of "seqarch.mixers"."""
    return group.rpartition(".")[2].removesuffix("s")


def named(point: EntryPoint) -> str:
    """Its kind, its name and its package, for messages."""
    return f"{kind_of(point.group)} '{point.name}' of package {described(point)}"


def described(point: EntryPoint) -> str:
    """ "package (module:Class)"."""
    return f"{name_and_version(point.dist)[0]} ({point.value})"


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    with refused(f"there is no class {path}", ImportError, AttributeError, why=True):
        return getattr(importlib.import_module(module), name)


def _subclasses(base: type) -> Iterator[type]:
    yield base
    for child in base.__subclasses__():
        yield from _subclasses(child)


def _classes_and_functions(config: Any) -> Iterator[Any]:
    """Every `class_path` and every function in nested mappings and lists."""
    if hasattr(config, "as_dict"):
        config = config.as_dict()
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from [str(value)] if key == "class_path" else _classes_and_functions(value)
    elif isinstance(config, list | tuple | set):
        for value in config:
            yield from _classes_and_functions(value)
    elif inspect.isroutine(config) or isinstance(config, functools.partial):
        yield config
