"""Files compared with their SHA-256, once: what matched is remembered by size and time of change.

The memory is one small file per folder, in `memory_folder`. Without it every process compares anew.
"""

import contextlib
import hashlib
import os
from pathlib import Path

from seqarch.errors import UserError

_matched: dict[Path, set[str]] = {}
"""For each folder the lines of its memory, as this process last read them."""


def cache_folder() -> Path:
    """$SEQARCH_CACHE, or ~/.cache/seqarch."""
    return Path(os.environ.get("SEQARCH_CACHE") or Path.home() / ".cache" / "seqarch")


def memory_folder() -> Path:
    """The folder with the notes of which files match."""
    return cache_folder() / "verified"


def verify(path: Path, sha256: str, *, again: bool = False) -> None:
    """Compare a file with its checksum, unless it is known to match.

    Args:
        path: the file.
        sha256: what its content must give, in hexadecimal digits.
        again: read the file even if it is known to match.

    Raises:
        UserError: the file is not there, or its content differs.
    """
    if not again and is_known(path, sha256):
        return
    try:
        found = sha256_of(path)
    except FileNotFoundError as error:
        raise missing(path) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore it, or prepare the domain again") from error
    if found != sha256:
        raise damaged(path)
    remember([path], sha256)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def damaged(path: Path | str, how: str = "damaged: its content differs from its checksum in the manifest") -> UserError:
    """The error for a file of a domain, or its URL, that is not as it was prepared."""
    domain = os.path.dirname(os.path.dirname(path)) or "."
    return UserError(f"{path} is {how}; restore it, or remove {domain} and prepare the domain again")


def missing(path: Path | str) -> UserError:
    """The error for a file of a domain that is gone or too short."""
    return damaged(path, "missing or cut short")


def is_known(path: Path, sha256: str) -> bool:
    """Whether the file matched that checksum before and was not written since."""
    try:
        line = _line(path, sha256)
    except OSError:
        return False
    folder = path.parent
    if line not in _matched.get(folder, ()):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # no memory is no harm
            _matched[folder] = set(_memory(folder).read_text(encoding="utf-8").splitlines())
    return line in _matched.get(folder, ())


def remember(paths: list[Path], sha256: str) -> None:
    """Note that these files of one folder match."""
    lines = [_line(path, sha256) for path in paths]
    folder = paths[0].parent
    _matched.setdefault(folder, set()).update(lines)
    with contextlib.suppress(OSError):
        _memory(folder).parent.mkdir(parents=True, exist_ok=True)
        with _memory(folder).open("a", encoding="utf-8") as stream:
            stream.write("".join(f"{line}\n" for line in lines))


def _line(path: Path, sha256: str) -> str:
    stat = path.stat()
    return f"{sha256} {stat.st_size} {stat.st_mtime_ns} {path.name}"


def _memory(folder: Path) -> Path:
    return memory_folder() / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
