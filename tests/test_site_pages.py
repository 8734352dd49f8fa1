"""Pages of the site that are made: the notebook runs, the gallery has every model, a search answers questions."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.tables import gallery, results
from scripts import notebook
from scripts import site as hooks
from seqarch.tables import read_csv

ROOT = Path(__file__).parents[1]
FIRST = 3
"""A page must be among so many pages that a search finds."""
COMMON = re.compile(
    r"(an?|and|are|by|can|do(es)?|for|from|how|i[ns]?|it|my|of|on|one|or|the|there|to|use|was|wh(at|ere|ich|y))"
)


def words(text: str) -> list[str]:
    """The words of a text without common ones and without endings, as a search index keeps them."""
    found = re.findall(r"[a-z0-9&+]+", text.lower())
    return [
        re.sub(r"(?<=\w{3})(ies|es|s|ing|ed|er|e|y|ation)$", "", word) for word in found if not COMMON.fullmatch(word)
    ]


def sections() -> list[tuple[str, Counter[str], Counter[str]]]:
    """The page, title and text of each section, as the site's search has them."""
    found = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        page = str(path.relative_to(ROOT / "docs"))
        if page.startswith("api/"):  # the site puts these last
            continue
        text = re.sub(r"<!--.*?-->|\]\([^)]*\)|[`*|\[]", " ", path.read_text(encoding="utf-8"))
        for part in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
            title, _, body = part.partition("\n")
            found.append((page, Counter(words(title)), Counter(words(body))))
    return found


def search(index: list[tuple[str, Counter[str], Counter[str]]], question: str) -> list[str]:
    """The pages by the best of their sections; a word in a title counts ten times."""
    rare = {}
    for word in set(words(question)):
        has = sum(word in title or word in body for _, title, body in index)
        rare[word] = math.log(1 + len(index) / (1 + has))
    best: dict[str, float] = {}
    for page, title, body in index:
        length = 0.5 + 0.5 * body.total() / 150
        score = sum(
            weight * (10 * min(title[word], 1) + 2.2 * body[word] / (body[word] + 1.2 * length))
            for word, weight in rare.items()
        )
        best[page] = max(best.get(page, 0.0), score)
    return sorted(best, key=lambda page: -best[page])


def test_a_search_answers_the_questions_of_newcomers():
    index, rows = sections(), read_csv(hooks.ASKED)
    assert len(rows) >= 30
    missed = {row["question"]: search(index, row["question"])[:FIRST] for row in rows}
    answers = {row["question"]: row["page"] for row in rows}
    assert {question: pages for question, pages in missed.items() if answers[question] not in pages} == {}


def test_the_page_of_questions_leads_to_pages():
    targets = re.findall(r"\]\(([^)]+)\)", hooks.questions_page())
    assert targets
    assert [target for target in targets if not (ROOT / "docs" / target).is_file()] == []


def test_the_gallery_has_every_model_that_was_examined():
    names = {one.name for one in gallery.examined()}
    assert set(results.PAPER) | {results.REFERENCE} <= names
    records = (ROOT / "plugins/seqarch-zoo/benchmarks/exam_small").glob("*-seed_0.tar.xz")
    assert {path.name.removesuffix("-seed_0.tar.xz") for path in records} <= names
    page = gallery.page()
    assert page.count("<tr>") == len(names) + 1
    assert {row.count("<td") for row in page.splitlines() if row.startswith("<tr>")} == {len(gallery.COLUMNS)}


def test_the_site_shows_the_sharper_of_two_files_of_a_figure():
    image = '<img alt="gaps" src="../results/fourteen/{}" />'.format
    for given, shown in (("gaps.png", "gaps.svg"), ("no.png", "no.png")):
        page = hooks.FIGURE.sub(lambda found: hooks.as_svg(found, "concepts/"), image(given))
        assert page == image(shown)


def test_the_notebook_shows_no_paths_of_a_machine():
    text = hooks.NOTES.read_text(encoding="utf-8")
    assert '"output_type"' in text
    assert re.findall(r"/(?:home|root|tmp|work|usr)/[\w./-]+", text) == []
    assert "![" not in notebook.page(hooks.NOTES)


@pytest.mark.commands
def test_the_notebook_runs(tmp_path, monkeypatch):
    """Its cells in one process, with fewer steps, seeds and branches and without reports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("seqarch.experiment.run.report", lambda runs, out: [out / "index.html"])
    space = vars(sys.modules["__main__"])
    known = set(space)
    try:
        for cell in notebook.code_cells(hooks.NOTES):
            fewer = re.sub(r"^STEPS = \d+", "STEPS = 24", cell, flags=re.MULTILINE).replace("(0, 1)", "(0,)")
            fewer = re.sub(r'(?<=branches.at": ).*', "[0.5],", fewer)
            fewer = re.sub(r'(?<=ood_loss.at": ).*', "[0.5, 1.0],", fewer)
            exec(fewer, space)
        assert space["comparison"].findings.comparisons["causal_mean"].finished is not None
    finally:
        for name in set(space) - known:
            del space[name]
