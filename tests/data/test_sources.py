"""Text of every kind, by parts and by domains."""

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqarch import cli
from seqarch.data import files
from seqarch.data.prepare import Preparation, join, prepare
from seqarch.data.select import Condition
from seqarch.data.shards import Domain
from seqarch.errors import UserError
from tests.data.conftest import make_texts, write_jsonl
from tests.data.test_prepare import contents, texts_of, tokens_of, zstd

TEXTS = [*make_texts(30, 0), 'a "quoted" text, with a comma\nand a line', "tab\tand \\ backslash"]


def arrow(path: Path, texts: list[str], kind: str = "stream") -> Path:
    table = pa.table({"id": range(len(texts)), "text": texts})
    with getattr(pa.ipc, f"new_{kind}")(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def saved(folder: Path, texts: list[str]) -> Path:
    """A folder as `datasets.Dataset.save_to_disk` writes it."""
    folder.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    arrow(folder / names[0], texts[:20])
    arrow(folder / names[1], texts[20:])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def text_files(folder: Path, texts: list[str]) -> Path:
    for i, text in enumerate(texts):
        path = folder / f"part {i // 9}" / f"{i:04}{'.md' if i % 2 else '.txt'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8-sig" if i % 3 else "utf-8", newline="")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "empty.txt").touch()
    return folder


def comma_separated(path: Path, texts: list[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([["id", "text"], *enumerate(texts)])
    return path


@pytest.mark.commands
@pytest.mark.usefixtures("small_pieces")
def test_every_kind_gives_the_same_documents(tmp_path: Path) -> None:
    table = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": TEXTS}), table)
    given = {
        "jsonl": write_jsonl(tmp_path / "texts.jsonl", TEXTS),
        "csv": comma_separated(tmp_path / "texts.csv", TEXTS),
        "stream": arrow(tmp_path / "texts.arrow", TEXTS),
        "file": arrow(tmp_path / "file.arrow", TEXTS, "file"),
        "folder": text_files(tmp_path / "folder", TEXTS),
        "saved": saved(tmp_path / "saved", TEXTS),
        "parquet": table,
    }
    made = {}
    for kind, path in given.items():
        made[kind] = prepare([path], tmp_path / "out", kind, "byte", holdout=0.2, workers=1)
    for kind in given:
        assert texts_of(tmp_path / "out" / kind, "train") == texts_of(tmp_path / "out/jsonl", "train")
        assert made[kind].splits["holdout"].sha256 == made["jsonl"].splits["holdout"].sha256
    rows = {kind: Domain(tmp_path / "out" / kind).rows("train") for kind in given.keys() - {"folder", "saved"}}
    for kind, numbers in rows.items():  # files, lines and tokens
        assert np.array_equal(numbers, rows["jsonl"]), kind
    assert [source.file for source in made["saved"].sources] == [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    prepare(list(given.values()), tmp_path / "out", "all", "byte", holdout=0.2, workers=2)
    once = texts_of(tmp_path / "out/jsonl", "train")
    assert sorted(texts_of(tmp_path / "out/all", "train")) == sorted(once * len(given))
    first = Domain(tmp_path / "out/folder").describe("train", 0, 1)
    assert first in [f"part 0/{i:04}{'.md' if i % 2 else '.txt'} line 1" for i in range(9)]


def test_a_saved_data_set_is_that_of_the_package(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    rows.select(range(len(TEXTS) - 1, -1, -1)).save_to_disk(tmp_path / "saved", num_shards=3)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "both")
    prepare([tmp_path / "saved"], tmp_path / "out", "web", "byte", holdout=0)
    assert texts_of(tmp_path / "out/web", "train") == TEXTS[::-1]
    with pytest.raises(UserError, match=r"both holds a data set of several splits \(train, test\): name the folder of"):
        prepare([tmp_path / "both"], tmp_path / "out", "both", "byte", holdout=0)


@pytest.mark.parametrize("pack", [bytes, zstd])
def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]) -> None:
    content = write_jsonl(tmp_path / "texts.jsonl", TEXTS).read_bytes()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(pack(content))))
    cli.run(["data", "prepare", "-", "--out", str(tmp_path / "out"), "--domain", "web", "--tokenizer", "byte"])
    prepare([tmp_path / "texts.jsonl"], tmp_path / "out", "file", "byte")
    assert tokens_of(tmp_path / "out/web", "train") == tokens_of(tmp_path / "out/file", "train")
    assert Domain(tmp_path / "out/web").manifest.sources[0].file.startswith("stdin.jsonl")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"web", "file"}


def test_a_data_set_of_the_hub_is_read_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a folder that stands for the Hub."""
    pytest.importorskip("datasets")
    pytest.importorskip("huggingface_hub")
    folder = tmp_path / "hub/datasets/some/texts@5c1/data"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"text": TEXTS[:15]}), folder / "0.parquet")
    (folder / "1.jsonl.zst").write_bytes(zstd(write_jsonl(tmp_path / "rest.jsonl", TEXTS[15:]).read_bytes()))
    system = fsspec.filesystem("dir", path=str(tmp_path / "hub"), fs=fsspec.filesystem("file"))
    hub = SimpleNamespace(
        open=lambda url, mode: system.open(url.removeprefix("hf://"), mode),
        info=lambda url: {"size": system.size(url.removeprefix("hf://")), "lfs": {"sha256": "5" * 64}},
        glob=lambda url: system.glob(url.removeprefix("hf://")),
    )
    names = [f"hf://datasets/some/texts@5c1/data/{name}" for name in ("0.parquet", "1.jsonl.zst")]
    config = SimpleNamespace(config=SimpleNamespace(data_files={"train": names}))
    asked = []
    monkeypatch.setattr("huggingface_hub.HfFileSystem", lambda: hub)
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *given: asked.append(given) or config)
    options: Any = {"tokenizer": "byte", "holdout": 0, "workers": 1}
    (whole,) = Preparation(["hf://datasets/some/texts"], tmp_path, "web", subset="small", **options).run()
    assert asked == [("some/texts", "small")]
    assert texts_of(tmp_path / "web", "train") == TEXTS
    assert [(source.file, source.sha256) for source in whole.sources] == [
        ("0.parquet", "5" * 64),
        ("1.jsonl.zst", "5" * 64),
    ]
    Preparation(["hf://datasets/some/texts@5c1/data/*.parquet"], tmp_path, "half", **options).run()
    assert texts_of(tmp_path / "half", "train") == TEXTS[:15]
    with pytest.raises(UserError, match=r"unknown split of hf://datasets/some/texts 'tarin': did you mean train\?"):
        Preparation(["hf://datasets/some/texts"], tmp_path, "other", split="tarin", **options).run()


def test_the_hub_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")

    def fail(*_: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("datasets.load_dataset_builder", fail)
    with pytest.raises(UserError, match=r"^hf://datasets/some/texts cannot be listed: no route to host$"):
        files.find_files(["hf://datasets/some/texts"])
    with pytest.raises(
        UserError, match=r"hf://some/texts does not name a data set of the Hub: give hf://datasets/OWNER/NAME"
    ):
        files.find_files(["hf://some/texts"])


def parts(tmp_path: Path, n: int = 7) -> list[Path]:
    return [write_jsonl(tmp_path / f"texts-{i}.jsonl", make_texts(12, i)) for i in range(n)]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("n", [1, 3, 7])
def test_joined_parts_are_one_run_bit_by_bit(tmp_path: Path, n: int) -> None:
    inputs: Any = {"files": parts(tmp_path), "domain": "web", "tokenizer": "byte", "holdout": 0.2, "workers": 1}
    Preparation(out=tmp_path / "whole", **inputs).run()
    unfinished = tmp_path / f"out/web/.parts/1-of-{n}/done.json.partial"
    unfinished.parent.mkdir(parents=True)
    unfinished.touch()  # as a killed process leaves it
    for part in range(n, 0, -1):
        assert Preparation(out=tmp_path / "out", part=f"{part}/{n}", **inputs).run() == []
        assert not (tmp_path / "out/web/manifest.json").exists()
    cli.run(["data", "join", str(tmp_path / "out/web")])
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_parts_replace_no_domain(tmp_path: Path) -> None:
    first, *others = parts(tmp_path, 3)
    prepare([first], tmp_path, "web", "byte", holdout=0, workers=1)
    with pytest.raises(UserError, match=r"web is a prepared domain: choose another domain name or --out, or remove it"):
        Preparation(others, tmp_path, "web", "byte", part="1/2").run()


def test_a_part_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: Any = {"files": parts(tmp_path), "domain": "web", "tokenizer": "byte", "workers": 1}
    folder = tmp_path / "web"
    Preparation(out=tmp_path, part="1/3", **inputs).run()
    Preparation(out=tmp_path, part="3/3", **inputs).run()
    before = contents(folder)
    with pytest.raises(UserError, match=r"web lacks the part 2/3: prepare it with --part 2/3$"):
        join(folder)
    assert contents(folder) == before
    Preparation(out=tmp_path, part="2/3", **{**inputs, "holdout": 0.5}).run()
    with pytest.raises(UserError, match=r"was prepared otherwise than part 1 \(holdout\): prepare it again"):
        join(folder)
    Preparation(out=tmp_path, part="2/3", **{**inputs, "files": inputs["files"][1:]}).run()
    with pytest.raises(UserError, match=r"was prepared otherwise than part 1 \(files\): prepare it again"):
        join(folder)
    piece = next((tmp_path / "web/.parts/2-of-3").glob("piece-*.npz"))
    Preparation(out=tmp_path, part="2/3", **inputs).run()
    for damage in (lambda: piece.write_bytes(piece.read_bytes()[:-9]), piece.unlink):
        damage()
        with pytest.raises(UserError, match=r"2-of-3 is damaged: remove it, and prepare this part again$"):
            join(tmp_path / "web")
    Preparation(out=tmp_path, part="1/4", **inputs).run()
    with pytest.raises(UserError, match=r"web holds parts of 3 and 4: keep those of one"):
        join(folder)
    with pytest.raises(UserError, match=r"holds parts of nothing: keep those of one"):
        join(tmp_path)


def meta(name: str, **other: Any) -> dict[str, Any]:
    return {"meta": {"redpajama_set_name": name}, **other}


def test_a_field_names_the_domain(tmp_path: Path) -> None:
    """As in SlimPajama, whose rows hold the set that they come from."""
    names = [["RedPajamaC4", "RedPajamaArXiv", "RedPajamaStackExchange"][i * i % 3] for i in range(len(TEXTS))]
    rows = [{"text": text, **meta(name)} for text, name in zip(TEXTS, names, strict=True)]
    (tmp_path / "train").mkdir()
    for i, chunk in enumerate((rows[:10], rows[10:])):
        lines = "".join(json.dumps(row) + "\n" for row in chunk)
        (tmp_path / "train" / f"example_train_{i}.jsonl.zst").write_bytes(zstd(lines.encode()))
    field = "meta.redpajama_set_name"
    inputs: Any = {"files": [tmp_path / "train"], "tokenizer": "byte", "holdout": 0.3, "workers": 1}
    made = Preparation(out=tmp_path / "all", domain_field=field, **inputs).run()
    assert [manifest.domain for manifest in made] == sorted(set(names))
    for name in set(names):
        Preparation(out=tmp_path / "one", domain=name, where=[f"{field}={name}"], **inputs).run()
        for split in ("train", "holdout"):
            ours, alone = tmp_path / "all" / name / split, tmp_path / "one" / name / split
            assert contents(ours) == contents(alone)
    assert {path.name for path in (tmp_path / "all").iterdir()} == set(names)
    before = contents(tmp_path / "all")
    assert Preparation(out=tmp_path / "all", domain_field=field, **inputs).run() == made
    with pytest.raises(UserError, match=r"was prepared from other inputs \(holdout\): choose another domain name"):
        Preparation(out=tmp_path / "all", domain_field=field, **{**inputs, "holdout": 0.1}).run()
    shutil.rmtree(tmp_path / "all" / ".work")
    assert contents(tmp_path / "all") == before
    with pytest.raises(UserError, match=r"no document in holdout of Red"):  # after some shards were written
        Preparation(out=tmp_path / "again", domain_field=field, **{**inputs, "holdout": 1e-9}).run()
    Preparation(out=tmp_path / "again", domain_field=field, **inputs).run()
    assert contents(tmp_path / "again") == before
    for part in ("1/2", "2/2"):
        Preparation(out=tmp_path / "parts", domain_field=field, part=part, **inputs).run()
    join(tmp_path / "parts")
    assert contents(tmp_path / "parts") == before


def test_layouts_of_published_data_sets(tmp_path: Path) -> None:
    """Small files with the columns of FineWeb-Edu, AutoMathText and DCLM."""
    n = len(TEXTS)
    table = {"text": TEXTS, "id": list(map(str, range(n))), "int_score": [i % 5 for i in range(n)], "score": [0.5] * n}
    pq.write_table(pa.table(table), tmp_path / "000_00000.parquet")
    prepare([tmp_path / "000_00000.parquet"], tmp_path, "edu", "byte", where=["int_score>=3"], holdout=0)
    assert texts_of(tmp_path / "edu", "train") == [text for i, text in enumerate(TEXTS) if i % 5 >= 3]
    rows = [
        {"url": "x", "text": text, "date": None, "meta": {"openwebmath_score": i / n, "openwebmath_perplexity": 9.5}}
        for i, text in enumerate(TEXTS)
    ]
    (tmp_path / "0.80-1.00.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"where": ["meta.openwebmath_score>=0.5", "url=x", "date!=2020"], "holdout": 0}
    prepare([tmp_path / "0.80-1.00.jsonl"], tmp_path, "math", "byte", **options)
    assert texts_of(tmp_path / "math", "train") == TEXTS[n // 2 :]
    rows = [
        {"text": text, "language_id_whole_page_fasttext": {"en": 0.9}, "fasttext_openhermes_score": 0.1 * (i % 3)}
        for i, text in enumerate(TEXTS)
    ]
    (tmp_path / "shard_00000000_processed.jsonl.zst").write_bytes(zstd("\n".join(map(json.dumps, rows)).encode()))
    prepare([tmp_path / "shard_00000000_processed.jsonl.zst"], tmp_path, "dclm", "byte", holdout=0)
    assert texts_of(tmp_path / "dclm", "train") == TEXTS


def test_nested_columns_and_conditions_of_tables(tmp_path: Path) -> None:
    content = [{"body": text, "lang": "en" if i % 2 else None, "ok": i % 3 == 0} for i, text in enumerate(TEXTS)]
    pq.write_table(pa.table({"n": range(len(TEXTS)), "content": content}), tmp_path / "a.parquet")
    options: Any = {
        "text_field": "content.body",
        "where": ["content.lang=en", "content.ok = true", "n<20"],
        "holdout": 0,
    }
    prepare([tmp_path / "a.parquet"], tmp_path, "web", "byte", **options)
    assert texts_of(tmp_path / "web", "train") == [text for i, text in enumerate(TEXTS[:20]) if i % 2 and i % 3 == 0]
    path = comma_separated(tmp_path / "b.csv", TEXTS)
    prepare([path], tmp_path, "csv", "byte", where=["id>=9", "id<10"], holdout=0)
    assert texts_of(tmp_path / "csv", "train") == [TEXTS[9]]


def test_words_that_python_reads_as_numbers() -> None:
    """Min Nan is the language nan; a number that is missing from a table is NaN."""
    rows = ["nan", "en", math.nan, 3.0, 10**400]
    assert [Condition.parse("x=nan").holds(each) for each in rows] == [True, False, False, False, False]
    assert [Condition.parse("x!=nan").holds(each) for each in rows] == [False, True, True, True, True]
    assert [Condition.parse("x<inf").holds(each) for each in rows[2:4]] == [False, True]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"domain": None}, "name the domain with --domain, or the field that holds it with --domain_field"),
        ({"domain_field": "meta.set"}, "name the domain with --domain, or the field that"),
        ({"where": ["score"]}, "--where score is not a condition such as int_score>=4, with one of >=, <=, !="),
        *[({"where": [f"id{sign}4"]}, f"{sign}4 is not a condition") for sign in ("==", "!==", "=>", ">==", "<>")],
        ({"where": ["id>="]}, "--where id>= is not a condition such as int_score>=4"),
        ({"where": ["score>1"]}, r"a\.jsonl:1: has no field 'score', only content, id: name one with --where"),
        ({}, r"a\.jsonl:1: has no field 'text', only content, id: add --text_field content$"),
        ({"text_field": "id.x"}, r"a\.jsonl:1: has no field 'id\.x', only content, id: add --text_field cont"),
        ({"domain": None, "domain_field": "id", "text_field": "content"}, "field 'id' holds a number, not text"),
        ({"domain": None, "domain_field": "content", "text_field": "content"}, "'a text' is not a domain name"),
        ({"part": "3/2"}, "--part 3/2 is not a part: give I/N with I from 1 to N, such as 2/8"),
        ({"part": "1/2"}, "--part 1/2: 2 parts need as many files, but there are 1"),
        (
            {"append": True, "holdout": None},
            "web is not a prepared domain, so nothing can be added: leave out --append",
        ),
        *[
            (
                {"append": True, "holdout": None, "tokenizer": None, name: value},
                f"--{name} has no effect with --append,",
            )
            for name, value in (("part", "1/1"), ("holdout", 0.02), ("eos_token", "x"), ("bos_token", ""))
        ],
        ({"append": True, "domain": None, "domain_field": "content"}, "--domain_field has no effect with --append"),
        ({"files": ["-"], "part": "1/1"}, "--part has no effect on standard input: leave it out"),
        *[({each: "x"}, f"--{each} has no effect on other files than a data set of") for each in ("subset", "split")],
        ({"tokenizer": ""}, "there is no tokenizer '': name a file, a folder or a repository"),
        ({"out": "s3://bucket/shards", "part": "1/1"}, "--part needs an --out that all machines see as a folder"),
    ],
)
def test_wrong_inputs_leave_nothing(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "a text", "id": 5}\n')
    inputs = {"files": [path], "out": tmp_path / "out", "domain": "web", "tokenizer": "byte", "holdout": 0, **options}
    with pytest.raises(UserError, match=said):
        Preparation(**inputs).run()
    assert not list((tmp_path / "out").rglob("manifest.json"))


@pytest.mark.parametrize("name", ["a/b", "", "..", "mean", "no", "a text"])
def test_the_first_row_of_no_valid_domain_is_named(tmp_path: Path, name: str) -> None:
    rows = [{"text": "a", "set": each} for each in ("web", "web", name, "web")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=rf"a\.jsonl:3: field 'set': .*'{re.escape(name)}'"):
        Preparation([tmp_path / "a.jsonl"], tmp_path / "out", domain_field="set", tokenizer="byte").run()
    assert not list((tmp_path / "out").rglob("piece-*"))


def test_a_column_that_is_missing_is_named_with_its_flag(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["a text"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"no column 'text', only content: add --text_field content$"):
        prepare([tmp_path / "a.parquet"], tmp_path, "web", "byte")
    comma_separated(tmp_path / "a.csv", TEXTS)
    with pytest.raises(UserError, match=r"no column 'set', only id, text: name one with --domain_field$"):
        Preparation([tmp_path / "a.csv"], tmp_path, domain_field="set.name", tokenizer="byte").run()


def test_links_in_a_folder_are_files_of_it(tmp_path: Path) -> None:
    """As in the cache of the Hugging Face Hub, whose files are links to others by their checksum."""
    folder = tmp_path / "texts"
    for name, blob in {"en": "1", "de": "2"}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "train.jsonl").symlink_to(write_jsonl(tmp_path / blob, [f"a text {name}"]))
    (tmp_path / "more").mkdir()
    write_jsonl(tmp_path / "more/train.jsonl", ["another text"])
    (folder / "fr").symlink_to(tmp_path / "more")
    (folder / "notes.md").mkdir()
    manifest = prepare([folder], tmp_path / "out", "web", "byte", holdout=0, workers=1)
    assert [each.file for each in manifest.sources] == ["de/train.jsonl", "en/train.jsonl", "fr/train.jsonl"]


def test_folders_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty holds no text: its files must end with \.jsonl, "):
        files.find_files([tmp_path / "empty"])
    (tmp_path / "empty/state.json").write_text('{"_data_files": [{"filename": "../other.arrow"}]}')
    with pytest.raises(UserError, match=r"state\.json lists no tables of this folder: save the data set again"):
        files.find_files([tmp_path / "empty"])
