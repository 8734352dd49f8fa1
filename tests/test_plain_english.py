"""`scripts/plain_english.py`, which `make lint` runs."""

from pathlib import Path

from scripts.plain_english import LONGEST, faults

BAD = [
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
]
GOOD = [
    "Only the selected element counts, at 400 tokens per second.",
    "The head uses a token of the domain.",
    " ".join(["word"] * LONGEST) + ". Another sentence.",
    "```\nOf a program's output: 3 tokens a second\n```",
    "| a table | 3 tokens a second, beside others, and " + "words " * LONGEST + " |",
    "Let $x$ be the loss and see [the page](a.md).",
]


def test_bad_sentences_are_found_and_good_ones_are_not(tmp_path: Path) -> None:
    page = tmp_path / "page.md"

    def passes(text: str) -> bool:
        page.write_text(f"# A page\n\nGood words stand here.\n\n{text}\n")
        return not list(faults(page))

    assert [bad for bad in BAD if passes(f"* {bad}")] == []
    assert [good for good in GOOD if not passes(good)] == []
