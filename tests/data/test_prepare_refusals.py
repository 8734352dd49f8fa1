"""What cannot be prepared is refused, with the file and the line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqarch.data.prepare import Preparation, prepare
from seqarch.errors import UserError
from seqarch.evaluation.rows import read_rows
from seqarch.experiment.experiment import Experiment
from tests.data.conftest import make_texts
from tests.data.test_prepare import zstd

Write = Callable[..., Path]


def line(**record: object) -> bytes:
    return json.dumps(record).encode() + b"\n"


GOOD = line(text="good")
LATIN = '{"text": "café"}\n'.encode("latin1")
NOT_UTF8 = "is not UTF-8 text:"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", GOOD + b'{"text": \n', r"a\.jsonl:2: is not JSON .*column"),
        ("a.jsonl", GOOD + GOOD + b"[1]\n", r"a\.jsonl:3: expected an object, .* not a list"),
        ("a.jsonl", GOOD + line(body="x"), r"has no field 'text', only body: leave the row out, or name one"),
        ("a.jsonl", line(body="x", id=1) + GOOD, r":1: has no field 'text', only body, id: add --text_field body"),
        ("a.jsonl", line(text=7), r"a\.jsonl:1: field 'text' holds a number, not text"),
        ("a.jsonl", line(text=None), r"a\.jsonl:1: field 'text' holds null, not text"),
        ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', r"a\.jsonl:2: is not JSON"),
        ("a.jsonl", GOOD + LATIN + GOOD, rf"a\.jsonl {NOT_UTF8} byte 0xe9 in line 2; save it as UTF-8$"),
        ("a.txt", b"a\n" + LATIN, rf"a\.txt {NOT_UTF8} byte 0xe9 in line 2; save it as UTF-8$"),
        ("a.csv", b"text\na\n" + LATIN, rf"a\.csv {NOT_UTF8} row 2; save it as UTF-8$"),
        ("a.csv", b"text,caf\xe9\na,b\n", rf"a\.csv {NOT_UTF8} byte 0xe9 in line 1; save it as UTF-8$"),
        ("a.jsonl", b"", r"a\.jsonl: the file is empty"),
        ("a.jsonl", b"\n\n", r"^no document in a\.jsonl: give other files"),
        ("a.jsonl", line(text=""), "left out: 1 empty.: give more"),
        ("a.jsonl.zst", GOOD, r"a\.jsonl\.zst: cannot be read"),
        ("a.jsonl.zst", zstd(GOOD * 99)[:-4], r"a\.jsonl\.zst: cannot be read whole as the kind of file"),
        ("a.jsonl.gz", GOOD, r"a\.jsonl\.gz: cannot be read"),
        ("a.jsonl.gz", gzip.compress(GOOD * 99, mtime=0)[:-12], r"a\.jsonl\.gz: cannot be read"),
        ("a.parquet", GOOD, r"a\.parquet: cannot be read whole as the kind of file"),
        ("a.pdf", GOOD, r"a\.pdf: cannot read this kind of file; its name must end with \.jsonl"),
        ("absent.jsonl", None, r"there is no file '.*absent\.jsonl'"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare([tmp_path / name], tmp_path / "out", "web", "byte", holdout=0)
    assert not (tmp_path / "out" / "web" / "manifest.json").exists()


def test_parquet_with_two_columns_of_one_name(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.parquet", [pa.array(["x"]), pa.array(["y"]), pa.array(["z"])]
    pq.write_table(pa.Table.from_arrays(rows, ["text", "other", "text"]), path)
    said = rf"^{path}: 2 columns are called 'text': leave one, or rename the others$"
    with pytest.raises(UserError, match=said):
        prepare([path], tmp_path / "out", "web", "byte", holdout=0)
    with pytest.raises(UserError, match=said):
        read_rows(path)
    prepare([path], tmp_path / "out", "web", "byte", text_field="other", holdout=0)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["x"]}, "no column 'text', only body: add --text_field body"),
        ({"text": [1]}, r"a\.parquet:1: field 'text' holds a number, not text"),
        ({"text": ["x", None]}, r"a\.parquet:2: field 'text' holds null, not text"),
    ],
)
def test_wrong_parquet(tmp_path: Path, columns: dict, message: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=message):
        prepare([tmp_path / "a.parquet"], tmp_path / "out", "web", "byte", holdout=0)


def test_parquet_with_a_damaged_page(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": make_texts(200, 0)}), tmp_path / "a.parquet")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[200:260] = bytes(60)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read whole as the kind of file"):
        prepare([tmp_path / "a.parquet"], tmp_path / "out", "web", "byte", holdout=0)


def test_parquet_with_a_text_that_is_not_utf8(tmp_path: Path) -> None:
    offsets = pa.array([0, 1, 3], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff\xfe")])
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet is not UTF-8 text: row 2; save it as UTF-8$"):
        prepare([tmp_path / "a.parquet"], tmp_path / "out", "web", "byte", holdout=0)


@pytest.mark.commands
@pytest.mark.usefixtures("small_pieces")
def test_the_first_wrong_line_is_named_by_workers_too(jsonl: Write, tmp_path: Path) -> None:
    file = jsonl(make_texts(100, 0))
    lines = file.read_bytes().splitlines(keepends=True)
    lines[70] = lines[90] = b"{]\n"
    file.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"texts\.jsonl:71: is not JSON"):
        prepare([file], tmp_path / "out", "web", "byte", workers=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domain": "a/b"}, "'a/b' is not a domain name"),
        ({"domain": ".."}, "is not a domain name"),
        ({"domain": "mean"}, "'mean' is the mean of domains"),
        ({"tokenizer": "mixtrl"}, "unknown tokenizer 'mixtrl': did you mean mixtral"),
        ({"holdout": 2.0}, "holdout must lie in 0..1, not 2.0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be at most max_tokens, not 9 with 8"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"files": []}, "no files"),
        ({"holdout": 1e-9}, "no document in holdout of web .20 documents, .* another --holdout than 1e-09"),
        ({"holdout": 1 - 1e-9}, "no document in train of web .20 documents, "),
        ({"text_field": "body"}, r"texts\.jsonl:1: has no field 'body', only text: "),
    ],
)
def test_wrong_options(jsonl: Write, tmp_path: Path, options: dict, message: str) -> None:
    defaults = {"files": [jsonl(make_texts(20, 0))], "domain": "web", "tokenizer": "byte"}
    with pytest.raises(UserError, match=message):
        prepare(out=tmp_path / "out", **{**defaults, **options})


@pytest.mark.parametrize("named", [{"domain": "web"}, {"domain_field": "text"}, {"domain": "old", "append": True}])
def test_conditions_that_no_row_meets_are_named(jsonl: Write, tmp_path: Path, named: dict) -> None:
    prepare([jsonl(["a"])], tmp_path, "old", "byte", holdout=0)
    said = r"^no document in b\.jsonl with --where text=b and text!=a"
    with pytest.raises(UserError, match=said):
        Preparation([jsonl(["c"], "b.jsonl")], tmp_path, where=["text=b", "text!=a"], tokenizer="byte", **named).run()


def test_one_document_cannot_be_held_out_and_trained_on(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("one long text")
    with pytest.raises(UserError, match=r"no document in .*[(]1 document, .*: give more \(a text file is one"):
        prepare([tmp_path / "all.txt"], tmp_path / "out", "web", "byte")


NAMES = [
    "yes",
    "No",
    "on",
    "OFF",
    "true",
    "null",
    "Null",
    "1e3",
    "2E-5",
    "0x10",
    "010",
    "1_000",
    "12",
    "1.5",
    "1.e3",
    "2024-01-31",
    "2024-13-45",
    "0b1",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_recipes_read_as_another_value(jsonl: Write, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"^recipes read '{name}' as another value"):
        prepare([jsonl(["a"])], tmp_path / "out", name, "byte")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["y", "nan", "e3", "0x", "1e", "v1.5", "no-code", "08", "0o7"])
def test_names_that_recipes_read_as_they_are(jsonl: Write, tmp_path: Path, name: str) -> None:
    assert prepare([jsonl(["a"])], tmp_path / "out", name, "byte", holdout=0).domain == name
    (tmp_path / "r.yaml").write_text(f"extends: quickstart\ndata: {{train: {{{name}: 1.0}}, ood: [{name}]}}\n")
    data = Experiment.from_recipe(tmp_path / "r.yaml").options.data
    assert ([*data.train], data.ood) == ([name], [name])


def test_numbers_and_brackets_that_python_cannot_read(jsonl: Write, tmp_path: Path) -> None:
    file = jsonl(["a"])
    for line, message in (
        ('{"text": ' + "[" * 100_000, "is not JSON"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "is not JSON"),
    ):
        file.write_text('{"text": "a"}\n' + line + "\n")
        with pytest.raises(UserError, match=f"texts.jsonl:2: .*{message}"):
            prepare([file], tmp_path / "out", "web", "byte")


def test_a_long_domain_name(jsonl: Write, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^'a{100}' is not a domain name: use at most 100 letters, .* a letter or digit first"
    ):
        prepare([jsonl(["a"])], tmp_path / "out", "a" * 300, "byte")
