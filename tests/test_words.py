"""The English of pages, docstrings, help texts and messages: short sentences without habits that slow readers down."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    path
    for part in ("*.md", "docs/**/*.md", "seqarch/**/*.md", "plugins/**/*.md")
    for path in ROOT.glob(part)
    if "build" not in path.parts
]
CODE = [
    path
    for part in ("seqarch", "plugins", "scripts", "benchmarks")
    for path in (ROOT / part).rglob("*.py")
    if "build" not in path.parts
]
LONGEST = 30
"""Words of a sentence in a page. Aim at 25."""
COUNTED = (
    "tokens|bytes|nats|operations|FLOPs?|exponentials|numbers?|seconds|minutes|hours|ms|µs|[KMG]i?B|steps|samples|sequences|"
    "micro-batches|predictions|batches|passes|exchanges|states?|weights?|decays?|scalars?|norms?|elements|programs|keys|queries|"
    "chunks|draws|registers|launches|one"
)
UNIT = (
    "second|minute|hour|token|byte|step|run|side|pass|head|channel|layer|query|row|line|chunk|sequence|sample|program|process|"
    "device|worker|GPU|clock|cycle|domain|multiprocessor|position|document|element|epoch"
)
TICS = {
    "say 'only' or 'by itself'": r"(?i)\balone\b",
    "say 'next to', 'compared with' or 'also'": r"(?i)\bbesides?\b",
    "say 'is not a' or 'is not among'": r"(?<![Tt]here )\b(is|are|were) (no|none of)\b(?! (longer|more|\w+er)\b)",
    "use the common word": r"\b(one's|whom|called so|to mend|but for|of so many)\b",
    "begin with the subject": r"(?m)^(Of|By how|Over what|How what)\b|^What\b[^.?]*\b(is|are),",
    "say 'per' in a rate": rf"(?<!/)\b({COUNTED}) an? ({UNIT})\b(?!\'| (sees|attends|has|selects))"
    rf"|\b[Oo]ne (step|row|column|entry|paragraph|line) an? ({UNIT}|mixer|tag|model)\b",
}

NOUNLESS = r"\b(that|those) of\b(?!\")"
"""In pages: repeat the noun instead."""


def sentences(text: str) -> Iterator[str]:
    """The sentences of prose, each on one line. Code and formulas count as one word, links as their text."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``[^`]+``|`[^`]*`|\$[^$]+\$|\\\(.*?\\\)", "X", text, flags=re.DOTALL)
    text = re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", " ".join(text.split()))
    text = re.sub(r"\b(et al|e\.g|i\.e|vs|cf)\.", r"\1", text)
    ends = r"(?<=[.!?])[)\"']?\s+(?=[\"'(]?(?:[A-Z0-9]|seqarch|fla))"
    yield from (each.strip() for each in re.split(ends, text) if each.strip())


def prose(page: str) -> Iterator[str]:
    """The paragraphs and list items of a page, without tables, code, formulas and headings."""
    page = re.sub(r"^( *)(```|~~~).*?^\1\2", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^\$\$.*?\$\$|^\\\[.*?\\\]|<!--.*?-->|^---$.*?^---$", "", page, flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", page):
        if re.match(r" {4}", paragraph):
            continue
        lines = [line for line in paragraph.splitlines() if not re.match(r"\s*(\||#|<|!!!|:::)", line)]
        yield from re.split(r"^\s*(?:[*-]|\d+\.|>) ", "\n".join(lines), flags=re.MULTILINE)


def texts(source: str) -> Iterator[str]:
    """The docstrings and other strings of a module that people read. An f-string counts by its fixed parts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [each.value if isinstance(each, ast.Constant) else "X" for each in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module, without tables of files and the sections on arguments, results and errors."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            text = re.sub(r"(?m)^.*\S {2,}\S.*$", "", text)
            yield re.sub(r"(?ms)^(Args|Returns|Raises|Source):\n.*?(?=^\S|\Z)", "\n\n", text)


def comments(recipe: str) -> str:
    return " ".join(re.findall(r"^# (.*)", recipe, flags=re.MULTILINE))


def tics(text: str) -> Iterator[str]:
    for sentence in sentences(text):
        for advice, pattern in TICS.items():
            if found := re.search(pattern, sentence):
                yield f"{advice}: ...{sentence[max(found.start() - 30, 0) : found.end() + 30]}..."


def long_sentences(text: str) -> Iterator[str]:
    for sentence in sentences(text):
        words = len([word for word in sentence.split() if re.search(r"\w", word)])
        if words > LONGEST:
            yield f"{words} words: {sentence[:100]}..."


def nounless(text: str) -> Iterator[str]:
    yield from (sentence for sentence in sentences(text) if re.search(NOUNLESS, sentence))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_short_plain_sentences(page: Path) -> None:
    paragraphs = list(prose(page.read_text(encoding="utf-8")))
    assert not [each for part in paragraphs for check in (tics, long_sentences, nounless) for each in check(part)]


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_help_and_messages_are_plain(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    paragraphs = [part for text in texts(source) for part in re.split(r"\n\s*\n", text)]
    assert not [each for paragraph in paragraphs for each in tics(paragraph)]
    assert not [each for text in docstrings(source) for paragraph in prose(text) for each in long_sentences(paragraph)]


def test_comments_of_recipes_are_plain() -> None:
    recipes = {path.name: comments(path.read_text(encoding="utf-8")) for path in (ROOT / "recipes").rglob("*.yaml")}
    assert recipes
    assert not {name: found for name, text in recipes.items() if (found := list(tics(text)))}


@pytest.mark.parametrize(
    "bad",
    [
        "For v through the selected element alone.",
        "Ours beside fla's.",
        "The gap is small. Of `tiny` the whole exam took 9 minutes.",
        "By how much a gap shrinks is its gap here.",
        "Over what a mean goes.",
        "What is measured is, at this size, mostly copying.",
        "It trains at 400 tokens a second.",
        "3 operations a token",
        "It keeps one row a step.",
        "The file is no checkpoint.",
        "Its options are those of the class.",
        "A package with a mixer of one's own.",
        "Beside fla's kernels it is fast.",
        " ".join(["word"] * (LONGEST + 1)) + ".",
    ],
)
def test_a_bad_sentence_is_found(bad: str) -> None:
    page = f"# A page\n\nGood words stand here.\n\n* {bad}\n"
    assert [each for part in prose(page) for check in (tics, long_sentences, nounless) for each in check(part)]


@pytest.mark.parametrize(
    "good",
    [
        "Only the selected element counts, at 400 tokens per second.",
        "The head uses a token of the domain.",
        " ".join(["word"] * LONGEST) + ". Another sentence.",
        "```\nOf a program's output: 3 tokens a second\n```",
        "| a table | 3 tokens a second, beside others, and " + "words " * LONGEST + " |",
        "Let $x$ be the loss and see [the page](a.md).",
    ],
)
def test_a_good_sentence_is_not(good: str) -> None:
    assert not [each for paragraph in prose(good) for check in (tics, long_sentences) for each in check(paragraph)]
