"""Errors that are the user's to mend."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Wrong input: the message is one sentence that names what is wrong and says what would be right.

    The command line prints it without a traceback and exits with status 2. Anything else that escapes is a bug of ours.
    """


class SeqarchWarning(UserWarning):
    """Something that the user should know; the command line prints the message on one line."""


class PluginWarning(SeqarchWarning):
    """Something that another package provides is left out."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a `name` that is not among the `known` ones: it lists the nearest, or all when none is near."""
    known = sorted(known)
    lowered = {candidate.lower(): candidate for candidate in known}
    near = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known) or 'none'}"
    return UserError(f"unknown {kind} '{name}': {hint}")


def check_counts(**counts: int | None) -> None:
    """Refuse the first that is below 1; None, for a default, passes."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UserError(f"{name} must be at least 1, not {count}")


def one_line(message: object) -> str:
    """The message on one line."""
    return " ".join(str(message).split())
