"""Rows that are made of published files score as those of the hub, and other files are refused."""

import io
import json
import tarfile

import pyarrow
import pyarrow.parquet
import pytest

from seqarch.cli import run
from seqarch.errors import UserError
from seqarch.evaluation import evaluate, published
from seqarch.evaluation.cloze import Cloze
from seqarch.evaluation.few_shot import FewShot
from seqarch.evaluation.published import Published, write_rows

ARTICLE = {
    "answers": ["B", "D"],
    "options": [["a ball", "a strike", "a run", "a fall"], ["one", "two", "three", "four"]],
    "questions": ["He was late because of  _  .", "How many?"],
    "article": "A short story.\nIt has two lines, and café.",
    "id": "high1.txt",
}
XML = """<?xml version="1.0" encoding="UTF-8"?>
<collection>
<schema>
  <text> <txt1>The dog chased the cat
     because</txt1> <pron> it </pron> <txt2>was angry.</txt2> </text>
  <quote> <quote1></quote1> <pron>it</pron> <quote2>was angry</quote2> </quote>
  <answers> <answer>The dog</answer> <answer>The
   cat</answer> </answers>
  <correctAnswer> A. </correctAnswer>
  <source>us</source>
</schema>
<schema>
  <text> <pron>It</pron> <txt2>was angry.</txt2> </text>
  <answers> <answer>The dog</answer> <answer>The cat</answer> </answers>
  <correctAnswer>B</correctAnswer>
</schema>
<schema><text>one of those that the task leaves out</text></schema>
</collection>
"""
BASED = [
    {"doc_id": "1", "text": "Name: Anna\nAge: 7\nName:", "key": "Name", "value": " Anna "},
    {"doc_id": "2", "text": "Name: Ben\nName:", "key": "Name", "value": "Carl"},
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The published files, with two rows each."""
    counts = {"race": Published(published.race, 2, 4), "wsc273": Published(published.wsc273, 2)}
    monkeypatch.setattr(published, "TASKS", counts | {"squad": Published(published.based, 2)})


def race_file(path, *articles, split="test/high"):
    with tarfile.open(path, "w:gz") as archive:
        texts = {f"RACE/{split}/{number}.txt": article for number, article in enumerate(articles)}
        for name, article in {**texts, "RACE/test/middle/1.txt": {}, "RACE/train/high/9.txt": {}}.items():
            content = json.dumps(article).encode()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def written(folder, task):
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_race_has_the_high_school_test_articles(tmp_path):
    path = race_file(tmp_path / "RACE.tar.gz", ARTICLE, {**ARTICLE, "article": "Another."})
    assert "2 rows" in write_rows("race", path, tmp_path / "rows")
    first, second = written(tmp_path / "rows", "race")
    assert (first["article"], second["article"]) == (ARTICLE["article"], "Another.")
    assert first["problems"] == str(
        [
            {"question": question, "options": options, "answer": answer}
            for question, options, answer in zip(
                ARTICLE["questions"], ARTICLE["options"], ARTICLE["answers"], strict=True
            )
        ]
    )


def test_wsc273_has_the_place_of_the_pronoun(tmp_path):
    (tmp_path / "WSCollection.xml").write_text(XML)
    run(["data", "rows", "wsc273", str(tmp_path / "WSCollection.xml"), "--out", str(tmp_path / "rows")])
    first, second = written(tmp_path / "rows", "wsc273")
    assert first["text"] == "The dog chased the cat because it was angry."
    assert first["text"][first["pronoun_loc"] :].startswith("it was")
    assert (first["options"], first["label"]) == (["The dog", "The cat"], 0)
    assert (second["text"], second["pronoun_loc"], second["label"]) == ("It was angry.", 0, 1)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("race", (f"Article: {ARTICLE['article']}\n\nHe was late because of a strike\nHow many?", " four")),
        ("wsc273", ("The dog chased the cat because the dog", "  was angry.")),
    ],
)
def test_lm_eval_asks_the_rows(tmp_path, task, expected):
    pytest.importorskip("lm_eval")
    from tests.evaluation.test_few_shot import Knows

    race_file(tmp_path / "race", ARTICLE, ARTICLE)
    (tmp_path / "wsc273").write_text(XML)
    write_rows(task, tmp_path / task, tmp_path / "rows")
    knows = Knows(lambda *_: 0.0)
    evaluate([FewShot(task, folder=str(tmp_path / "rows"))], knows, None)
    assert expected in knows.seen


def test_rows_of_based_keep_their_text(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(BASED), tmp_path / "squad.parquet")
    assert "in 1 the text lacks the value" in write_rows("squad", tmp_path / "squad.parquet", tmp_path / "rows")
    assert written(tmp_path / "rows", "squad") == [
        {name: row[name] for name in ("text", "key", "value")} for row in BASED
    ]
    task = Cloze("squad", folder=str(tmp_path / "rows"))
    task.prepare(None)
    assert task.asked[0] == ("Name: Anna\nAge: 7\nName:", "Anna")


@pytest.mark.parametrize(
    ("articles", "message"),
    [
        ([ARTICLE], "has 1 rows of race: the published file has 2"),
        ([ARTICLE, {**ARTICLE, "questions": ["How many?"]}], "1.txt: an article has questions"),
        ([ARTICLE, {**ARTICLE, "answers": ["B", "E"]}], "answers A to D"),
        ([ARTICLE, {**ARTICLE, "options": [["a"] * 3, ["b"] * 4]}], "4 options each"),
        (
            [ARTICLE, {key: each[:1] if isinstance(each, list) else each for key, each in ARTICLE.items()}],
            "3 questions",
        ),
        ([ARTICLE, []], "1.txt: an article has questions"),
    ],
)
def test_another_race_is_refused(tmp_path, articles, message):
    with pytest.raises(UserError, match=message):
        write_rows("race", race_file(tmp_path / "RACE.tar.gz", *articles), tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("</collection>", "", "is not a whole XML file"),
        ("<answer>The dog</answer> <answer>The cat</answer>", "<answer>The dog</answer>", "schema 2: .* two answers"),
        ("<correctAnswer>B</correctAnswer>", "", "schema 2: .* A or B"),
        ("<collection>", "<collection><schema/>", "schema 1: a schema has a pronoun"),
    ],
)
def test_another_collection_is_refused(tmp_path, old, new, message):
    (tmp_path / "file.xml").write_text(XML.replace(old, new))
    with pytest.raises(UserError, match=message):
        write_rows("wsc273", tmp_path / "file.xml", tmp_path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        write_rows("race", tmp_path / "RACE.tar.gz", tmp_path)
    (tmp_path / "RACE.tar.gz").write_bytes(b"\x1f\x8bno")
    with pytest.raises(UserError, match="is not a whole tar file"):
        write_rows("race", tmp_path / "RACE.tar.gz", tmp_path)
    with pytest.raises(UserError, match="cannot read this kind of file"):
        write_rows("squad", tmp_path / "RACE.tar.gz", tmp_path)
    (tmp_path / "squad.jsonl").write_text(json.dumps({"text": "a", "key": "b"}) + "\n")
    with pytest.raises(UserError, match="row 1 has no value: a row has text, key, value"):
        write_rows("squad", tmp_path / "squad.jsonl", tmp_path)
    with pytest.raises(UserError, match="unknown task with a published file 'piqa'"):
        write_rows("piqa", tmp_path / "squad.jsonl", tmp_path)
    with pytest.raises(UserError, match="is a URL"):
        run(["data", "rows", "squad", str(tmp_path / "squad.jsonl"), "--out", "s3://bucket/rows"])
