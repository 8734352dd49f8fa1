"""Rows of tasks made of the files that the authors of the data published."""

import ast
import json
import re
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from seqarch.data.files import SUFFIXES
from seqarch.errors import UserError, check_known, refused
from seqarch.evaluation.cloze import FIELDS, contains
from seqarch.evaluation.rows import read_rows
from seqarch.runs.files import check_file, parse_json, write_text

Row = dict[str, Any]


def race(path: Path) -> list[Row]:
    """The articles of RACE's test split for high schools (arXiv 1704.04683), in the form of `EleutherAI/race`.

    Args:
        path: RACE.tar.gz, with one JSON file per article as `RACE/test/high/NUMBER.txt`.
    """
    rows = []
    with (
        refused(f"{path}: is not a whole tar file", tarfile.TarError, OSError, EOFError),
        tarfile.open(path) as archive,
    ):
        names = [name for name in archive.getnames() if re.fullmatch(r"(\./)?RACE/test/high/[^/.]+\.txt", name)]
        for name in sorted(names):
            file = archive.extractfile(name)
            article = parse_json(file.read() if file else b"", path / name)
            rows.append(_article(article, path / name))
    return rows


def _article(article: Any, path: Path) -> Row:
    keys = ("questions", "options", "answers")
    try:
        problems = [
            dict(zip(("question", "options", "answer"), each, strict=True))
            for each in zip(*(article[key] for key in keys), strict=True)
        ]
        whole = all(len(one["options"]) == 4 and one["answer"] in tuple("ABCD") for one in problems)
        text = str(article["article"])
    except (KeyError, TypeError, ValueError):
        whole, problems, text = False, [], ""
    if not (problems and whole and text.strip()):
        raise UserError(f"{path}: an article has {', '.join(keys)} of equal number, 4 options each, and answers A to D")
    return {"article": text, "problems": str(problems)}


def wsc273(path: Path) -> list[Row]:
    """The first 273 Winograd schemas of Davis' collection, in the form of `lighteval/winograd_wsc`.

    Args:
        path: WSCollection.xml.
    """
    with refused(f"{path}: is not a whole XML file", ElementTree.ParseError, OSError):
        schemas = list(ElementTree.parse(path).getroot())
    return [
        _schema(schema, f"{path}, schema {number}") for number, schema in enumerate(schemas[: TASKS["wsc273"].rows], 1)
    ]


def _schema(schema: ElementTree.Element, where: str) -> Row:
    def text(place: str) -> str:
        return " ".join(schema.findtext(place, "").split())

    before, pronoun, after = (text(f"text/{part}") for part in ("txt1", "pron", "txt2"))
    options = [" ".join((each.text or "").split()) for each in schema.findall("answers/answer")]
    answer = text("correctAnswer").strip(" .")
    if not (pronoun and after and len(options) == 2 and all(options) and answer in ("A", "B")):
        raise UserError(f"{where}: a schema has a pronoun, text after it, two answers, and A or B as the correct one")
    return {
        "text": " ".join([before, pronoun, after]).strip(),
        "pronoun": pronoun,
        "pronoun_loc": len(before) + 1 if before else 0,
        "options": options,
        "label": "AB".index(answer),
    }


def based(path: Path) -> list[Row]:
    """The rows of a data set of Based (arXiv 2402.18668).

    Args:
        path: the Parquet file of its validation split.
    """
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path}: cannot read this kind of file; its name must end with {', '.join(SUFFIXES)}")
    return [{name: row[name] for name in FIELDS} for row in read_rows(path, *FIELDS)]


class Published(NamedTuple):
    """A task: what reads its file, and how many rows and questions it has."""

    read: Callable[[Path], list[Row]]
    rows: int
    questions: int | None = None


TASKS: Mapping[str, Published] = {
    "race": Published(race, 1045, 3498),
    "wsc273": Published(wsc273, 273),
    "swde": Published(based, 1111),
    "squad": Published(based, 2984),
    "fda": Published(based, 1102),
}


def write_rows(task: str, file: Path, out: Path) -> str:
    """Make `out/TASK.jsonl`, for `seqarch eval --rows`, of a published file. Returns what was written, in words.

    Raises:
        UserError: the file is not there or not of this form, or has another number of rows or questions.
    """
    check_known("task with a published file", task, TASKS)
    check_file(file)
    made = TASKS[task]
    rows = made.read(file)
    if len(rows) != made.rows:
        raise UserError(f"{file} has {len(rows):,} rows of {task}: the published file has {made.rows:,}")
    questions = sum(len(ast.literal_eval(row["problems"])) for row in rows) if made.questions else None
    if questions != made.questions:
        raise UserError(f"{file} has {questions:,} questions of {task}: the published file has {made.questions:,}")
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{task}.jsonl"
    write_text(target, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    without = sum(not contains(row["text"], row["value"].strip()) for row in rows if "value" in row)
    return f"wrote {target}: {len(rows):,} rows" + (f"; in {without:,} the text lacks the value" if without else "")
