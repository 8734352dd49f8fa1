"""Texts of two domains for the tests: the same on each Python and machine, with the word frequencies of real text."""

from __future__ import annotations

import random

ENDS = [".", ".", ".\n", ", or so?", '; "no".\n\n']
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def prose(count: int, seed: int = 0) -> list[str]:
    """Documents of 100 to 25,000 characters. Frequent words are short, and each document repeats names of its own."""
    draw = random.Random(f"prose {seed}")
    words = [*LETTERS[:8], *_words(draw, 600)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    documents = []
    for _ in range(count):
        names = [word.title() for word in _words(draw, 4)]
        sentences = []
        for _ in range(int(4 ** draw.uniform(1, 4.5))):
            sentence = draw.choices(words, weights, k=draw.randint(3, 15))
            sentence[draw.randrange(len(sentence))] = " ".join(names[:2] if draw.random() < 0.7 else names[2:])
            sentences.append(" ".join(sentence).capitalize() + draw.choice(ENDS))
        documents.append(" ".join(sentences))
    return documents


def code(count: int, seed: int = 0) -> list[str]:
    """Documents of 3,000 to 60,000 characters that look like Python modules."""
    draw = random.Random(f"code {seed}")
    documents = []
    for _ in range(count):
        names = _words(draw, 60)
        lines = [f"import {name}" for name in names[:5]]
        for number in range(int(4 ** draw.uniform(2, 4.2))):
            function, value, other, module = draw.choices(names, k=4)
            lines += ["", "", f"def {function}_{value}(self, {value}, {other}=None):"]
            lines += [f'    """Return the {value} of {other}."""', f"    if {other} is None:"]
            lines += [f"        {other} = {module}.{function}({value}, {number})"] * draw.randint(1, 2)
            lines += [f"    return self.{module}[{value}] + {other} * {draw.randint(0, 999)}"]
        documents.append("\n".join(lines) + "\n")
    return documents


def _words(draw: random.Random, count: int) -> list[str]:
    weights = [1 / (rank + 2) for rank in range(len(LETTERS))]
    return ["".join(draw.choices(LETTERS, weights, k=draw.randint(2, 9))) for _ in range(count)]
