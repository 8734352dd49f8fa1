"""The code that decides a run, as one digest: other code makes another run."""

import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

import seqarch

DECIDES = ("data", "kernels", "mixers", "model", "evaluation", "training", "experiment")
"""Folders and files of seqarch that decide what a run trains and measures."""
SUFFIXES = (".py", ".json")
"""Suffixes of code files and of files with recorded kernel settings."""


def code_digest(packages: Iterable[str], *more: Path) -> str:
    """Eight digits that change with seqarch's own code, that in `more` folders, and all code of other packages."""
    parts = [*own_parts(), *more]
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        parts += [Path(part) for part in spec.submodule_search_locations or [spec.origin] if part]
    return digest(parts)


def own_parts() -> list[Path]:
    """The folders and files of seqarch that decide a run."""
    return [Path(seqarch.__file__).parent / part for part in DECIDES]


def digest(parts: Iterable[Path]) -> str:
    """Eight digits of the names and the contents of the code in folders and files."""
    total = hashlib.sha256()
    for part in parts:
        inside = [path for path in sorted(part.rglob("*")) if path.suffix in SUFFIXES and path.is_file()]
        for path in [part] if part.is_file() else inside:
            name = "" if path == part else path.relative_to(part).as_posix()
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{part.name}/{name} {content}\n".encode())
    return total.hexdigest()[:8]
