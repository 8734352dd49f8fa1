"""Errors that the user can correct, and the one function that prints."""

import contextlib
import ctypes
import difflib
import errno
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO


class UserError(ValueError):
    """Wrong input: the message is one sentence that names what is wrong and says what would be right.

    The command line prints it without a traceback and exits with status 2. Any other exception is a bug of seqarch.
    """


class DivergedError(UserError):
    """A loss or gradient of a training is not a finite number; `run.json` notes it."""


class SeqarchWarning(UserWarning):
    """Something that the user should know; the command line prints the message on one line."""


class PluginWarning(SeqarchWarning):
    """Something that another package provides is left out."""


@contextlib.contextmanager
def refused(
    message: str,
    *kinds: type[BaseException],
    why: bool | Callable[[Any], object] = False,
    raises: Callable[[str], Exception] = UserError,
) -> Iterator[None]:
    """Raise a `UserError`, or what `raises` makes of the message, in place of errors of these kinds.

    A `UserError` stays as it is unless it is named. `why` ends the message with that of the error, or with what it
    makes of the error.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, UserError) and UserError not in kinds:
            raise
        reason = one_line(why(error) if callable(why) else error)
        text = f"{message}: {reason[: WIDEST if UserError in kinds else 200]}" if why else message
        raise raises(text) from error


def in_utf8(path: object, line: int = 1) -> contextlib.AbstractContextManager[None]:
    """Refuse bytes of a file that are decoded and are not UTF-8, with their line; they begin in this `line`."""

    def place(error: UnicodeDecodeError) -> str:
        lines = line + error.object.count(b"\n", 0, error.start)
        return f"byte 0x{error.object[error.start]:02x} in line {lines}; save it as UTF-8"

    return refused(f"{path} is not UTF-8 text", UnicodeDecodeError, why=place)


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a `name` that is not among the `known` ones, with `near`."""
    known = list(known)
    return UserError(f"unknown {kind} '{name}'{near(name, known) if known else ': none is known'}")


def absent(kind: str, path: object, advice: str = "") -> UserError:
    """The error for a file or folder that is not there; its name is in quotes, since it may look like a word."""
    other = " (a file)" if os.path.isfile(str(path)) else " (a folder)" * (kind == "file" and os.path.isdir(str(path)))
    return UserError(f"there is no {kind} '{path}'{other}{advice and f': {advice}'}")


def check_package(module: str, who: str, install: str) -> None:
    """Raise `UserError` if a package is missing."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{who} needs the package {module.replace('_', '-')}: pip install {install}")


def check_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise `unknown` for a `name` that is not among the `known` ones."""
    if name not in (known := list(known)):
        raise unknown(kind, name, known)


def near(name: str, known: Iterable[str]) -> str:
    """ ": did you mean ...?" with the names that have these initials, else the nearest; or all where they are few."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(known)}
    meant = [each for each in by_lower if initials(each) == name.lower()]
    matches = meant or difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    alike = [difflib.SequenceMatcher(None, match, name.lower()).ratio() for match in matches]
    if matches:
        nearest = [by_lower[match] for match, ratio in zip(matches, alike, strict=True) if ratio > alike[0] - 0.1]
        return f": did you mean {one_of(nearest)}?"
    return f": expected {one_of(list(by_lower.values()))}" if 0 < len(by_lower) <= 24 else ""


def initials(name: str) -> str:
    """`--model.lr` for `--model.learning_rate`."""
    section, dot, words = name.rpartition(".")
    return section + dot + "".join(word[:1] for word in words.split("_"))


def one_of(names: Sequence[str]) -> str:
    """ "a, b or c"."""
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else "".join(names)


def several(value: object) -> list:
    """The values of an argument that takes several: one text, path or other thing is a list of itself."""
    return [value] if isinstance(value, str | os.PathLike) or not isinstance(value, Iterable) else list(value)


_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_COUNTS = ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_JOB_ID")
_VARIABLES = {
    "MASTER_PORT": range(2**16),
    **dict.fromkeys(_RANKS, range(2**31)),
    **dict.fromkeys(_COUNTS, range(1, 2**31)),
}
"""The variables of torchrun and SLURM that Lightning takes numbers from, partly while it is imported."""
_LAUNCHERS = {
    "SLURM_NTASKS": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    "TORCHELASTIC_RUN_ID": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
}
"""The variables that Lightning needs where another one says who starts the processes."""


def check_processes() -> None:
    """Refuse an environment that says about the processes of a run what cannot be."""
    for name, valid in _VARIABLES.items():
        value = os.environ.get(name, str(valid[0]))
        if not (value.isdecimal() and int(value) in valid):
            raise UserError(f"{name} is '{value}' in the environment: unset it, or set {valid[0]}..{valid[-1]}")
    for launcher, needed in _LAUNCHERS.items():
        missing = [name for name in needed if name not in os.environ]
        if missing and launcher in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
            raise UserError(f"{launcher} is in the environment and {missing[0]} is not: set it, or unset {launcher}")


def join_processes() -> None:
    """Take this process's place in a run: `check_processes`, and on Linux it will end with the one that started it.

    Else it would wait for that one, up to half an hour.
    """
    check_processes()
    if os.environ.get("LOCAL_RANK", "0") != "0" and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ENAMETOOLONG)
"""Errors of the system that come from a disk or a file's name, not from a bug."""
PLACE = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP)
"""Errors that do so if they name a file."""


def of_storage(error: OSError) -> str | None:
    """The message for an error that a disk or a file name caused; `None` for any other error."""
    if error.errno not in STORAGE and (error.errno not in PLACE or error.filename is None):
        return None
    where = f"{error.filename}: " if error.filename else ""
    what = "make room, or choose another place" if error.errno in STORAGE else "choose another place"
    return one_line(f"{where}{error.strerror}; {what}")


OVERFLOW = "size calculation overflow|Overflow when unpacking"
"""In PyTorch's errors about tensors that no memory can hold."""


def of_memory(error: Exception) -> str | None:
    """The message for an error of Python, NumPy or PyTorch that asked for too much memory; `None` for any other."""
    size = re.search(r"allocate ([\d.]+ [KMGTPE]?i?B(ytes)?)", str(error), re.IGNORECASE)
    of_torch = isinstance(error, RuntimeError | TypeError | OverflowError) and re.search(OVERFLOW, str(error))
    if not isinstance(error, MemoryError) and not (isinstance(error, RuntimeError) and size) and not of_torch:
        return None
    return f"there is not enough memory{f' for {size[1]}' if size else ''}: choose smaller sizes"


def one_line(message: object) -> str:
    """The message on one line, without what would change the terminal that shows it."""
    return _printable(" ".join(str(message).split()))


WIDEST = 2_000
"""The most letters of a line that is printed."""


def say(text: object, file: TextIO | None = None) -> None:
    """Print text that may come from other people's files: no line changes the terminal or is longer than `WIDEST`."""
    lines = str(text).split("\n")
    cut = [f"{line[:WIDEST]} ... ({len(line):,} characters)" if len(line) > WIDEST else line for line in lines]
    print("\n".join(map(_printable, cut)), file=file, flush=True)


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() or letter == "\t" else "?" for letter in line)
