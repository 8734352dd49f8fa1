"""Turns the parser's errors into one line that says what would be right."""

from __future__ import annotations


def one_line(message: str) -> str:
    """The error's sentences on one line."""
    return " ".join(message.split())
