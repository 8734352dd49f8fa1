"""Checks the English of pages, docstrings, help texts and messages: short sentences, no habits that slow readers down.

python scripts/plain_english.py
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = (
    *("*.md", "docs/**/*.md", "seqarch/**/*.md", "plugins/**/*.md"),
    *("seqarch/**/*.py", "plugins/**/*.py", "scripts/**/*.py", "benchmarks/**/*.py"),
    "recipes/**/*.yaml",
)
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


def faults(path: Path) -> Iterator[str]:
    """What to change in a page, a module or a recipe."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        for part in prose(source):
            for check in (tics, long_sentences, nounless):
                yield from check(part)
    elif path.suffix == ".py":
        for text in texts(source):
            for paragraph in re.split(r"\n\s*\n", text):
                yield from tics(paragraph)
        for text in docstrings(source):
            for paragraph in prose(text):
                yield from long_sentences(paragraph)
    else:
        yield from tics(comments(source))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    paths = [path for pattern in FILES for path in sorted(ROOT.glob(pattern)) if path.name != "plain_english.py"]
    files = [path.relative_to(ROOT) for path in paths]
    found = [f"{file}: {fault}" for file in files if "build" not in file.parts for fault in faults(ROOT / file)]
    sys.exit("\n".join(found) or 0)


if __name__ == "__main__":
    main()
