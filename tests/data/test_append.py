"""Documents that are added to a domain keep the domain's rules and its hold-out."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from seqarch import cli
from seqarch.data import assemble as assembling
from seqarch.data.prepare import Preparation, prepare
from seqarch.data.shards import Domain
from seqarch.errors import UserError
from tests.data.conftest import make_texts
from tests.data.test_prepare import Write, contents, texts_of


def rows(path: Path, **fields: list) -> Path:
    each = [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in each))
    return path


def test_the_conditions_of_the_domain_hold_for_added_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = rows(tmp_path / "old.jsonl", text=["old bad", "old good"], score=[1, 4], lang=["en", "de"])
    new = rows(
        tmp_path / "new.jsonl", text=["new bad", "new good", "new far"], score=[2, 3, 5], lang=["en", "en", "de"]
    )
    place = ["--out", str(tmp_path), "--domain", "web", "--workers", "1"]
    cli.main(["data", "prepare", str(old), *place, "--tokenizer", "byte", "--holdout", "0", "--where", "score>=3"])
    capsys.readouterr()
    cli.main(["data", "prepare", str(new), *place, "--append", "--where", "lang=en", "--where", "score>=3"])
    assert "web: rows must meet score>=3, lang=en" in capsys.readouterr().out
    assert texts_of(tmp_path / "web", "train") == ["old good", "new good"]
    assert Domain(tmp_path / "web").manifest.where == ("score>=3",)


def test_the_name_of_a_domain_is_that_of_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = rows(tmp_path / "old.jsonl", text=["an old text"]), rows(tmp_path / "new.jsonl", text=["a new text"])
    add = Preparation([new], tmp_path, "books", append=True, workers=1).run
    again = Preparation([old], tmp_path, "books", "byte", holdout=0).run
    Preparation([old], tmp_path, "web", "byte", holdout=0, workers=1).run()
    (tmp_path / "web").rename(tmp_path / "books")
    capsys.readouterr()
    for run in (again, add, add):
        run()
        assert capsys.readouterr().out.startswith("books: ")


def test_rows_of_other_domains_are_not_added(tmp_path: Path) -> None:
    old = rows(tmp_path / "old.jsonl", text=["an old page", "an old book"], set=["web", "books"])
    new = rows(tmp_path / "new.jsonl", text=["a new page", "a new book"], set=["web", "books"])
    Preparation([old], tmp_path, tokenizer="byte", holdout=0, domain_field="set", workers=1).run()
    Preparation([new], tmp_path, "web", append=True, workers=1).run()
    assert texts_of(tmp_path / "web", "train") == ["an old page", "a new page"]


def test_added_rows_without_the_field_of_a_condition_are_refused(tmp_path: Path) -> None:
    old = rows(tmp_path / "old.jsonl", text=["bad", "good"], score=[1, 4])
    new = rows(tmp_path / "new.jsonl", text=["unknown"])
    Preparation([old], tmp_path, "web", "byte", holdout=0, where=["score>=3"], workers=1).run()
    before = contents(tmp_path / "web/train")
    with pytest.raises(UserError, match=r"new\.jsonl:1: has no field 'score', only text"):
        Preparation([new], tmp_path, "web", append=True, workers=1).run()
    assert contents(tmp_path / "web/train") == before


def test_added_rows_have_their_text_in_the_field_of_the_domain(tmp_path: Path) -> None:
    old = rows(tmp_path / "old.jsonl", body=["an old text"], text=["an old title"])
    new = rows(tmp_path / "new.jsonl", body=["a new text"], text=["a new title"])
    other = rows(tmp_path / "other.jsonl", content=["a third text"])
    Preparation([old], tmp_path, "web", "byte", holdout=0, text_field="body", workers=1).run()
    Preparation([new], tmp_path, "web", append=True, workers=1).run()
    Preparation([other], tmp_path, "web", append=True, text_field="content", workers=1).run()
    assert texts_of(tmp_path / "web", "train") == ["an old text", "a new text", "a third text"]


def test_added_documents_leave_the_hold_out_alone(jsonl: Write, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    old, new = jsonl(make_texts(60, 0), "old.jsonl"), jsonl(make_texts(60, 1), "new.jsonl")
    options: Any = {"holdout": 0.3, "workers": 1}
    prepare([old], tmp_path / "out", "web", "byte", **options)
    prepare([old, new], tmp_path / "both", "web", "byte", **options)
    before = contents(tmp_path / "out/web/holdout")
    added = ["data", "prepare", str(new), "--out", str(tmp_path / "out"), "--domain", "web", "--append"]
    cli.run(added)
    assert contents(tmp_path / "out/web/holdout") == before
    assert contents(tmp_path / "out/web/train") == contents(tmp_path / "both/web/train")
    manifest = Domain(tmp_path / "out/web").manifest
    assert [source.file for source in manifest.sources] == ["old.jsonl", "new.jsonl"]
    assert manifest.splits["train"] == Domain(tmp_path / "both/web").manifest.splits["train"]
    assert {path.name for path in (tmp_path / "out/web").iterdir()} == {"holdout", "manifest.json", "train"}
    capsys.readouterr()
    before = contents(tmp_path / "out")
    cli.run(added)
    assert capsys.readouterr().out.endswith("added already, nothing to do\n")
    assert contents(tmp_path / "out") == before
    with pytest.raises(UserError, match=r"new\.jsonl is in .*web already: name new files only"):
        cli.run([*added[:2], str(jsonl(make_texts(60, 2), "newer.jsonl")), *added[2:]])


def test_added_documents_keep_the_limits_of_the_domain(jsonl: Write, tmp_path: Path) -> None:
    files = [jsonl([name * n for n in (10, 20, 30, 40, 50)], f"{name}.jsonl") for name in "abc"]
    limits: list[Any] = [{"min_tokens": 20, "max_tokens": 45}, {}, {"min_tokens": 35}]
    for file, own in zip(files, limits, strict=True):
        how: Any = {"append": True} if file != files[0] else {"tokenizer": "byte", "holdout": 0}
        Preparation([file], tmp_path, "web", workers=1, **how, **own).run()
    lengths = [(text[0], len(text)) for text in texts_of(tmp_path / "web", "train")]
    assert lengths == [*((name, n) for name in "ab" for n in (20, 30, 40)), ("c", 40)]
    manifest = Domain(tmp_path / "web").manifest
    assert (manifest.min_tokens, manifest.max_tokens) == (20, 45)
    assert (manifest.short_documents, manifest.long_documents) == (1 + 1 + 3, 3)


@pytest.mark.parametrize("place", ["rename", "publish"])
def test_an_interrupted_addition_is_finished(
    jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    old, new = jsonl(make_texts(60, 0), "old.jsonl"), jsonl(make_texts(60, 1), "new.jsonl")
    prepare([old], tmp_path, "web", "byte", holdout=0.3)
    more = Preparation([new], tmp_path, "web", append=True, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(assembling.os if place == "rename" else assembling, place, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            more.run()
    for use in (Domain, lambda folder: prepare([old], folder.parent, "web", "byte", holdout=0.3)):
        with pytest.raises(UserError, match=r"being added to .*web: repeat `data prepare --append`, which ends that$"):
            use(tmp_path / "web")
    more.run()
    prepare([old, new], tmp_path / "both", "web", "byte", holdout=0.3)
    assert contents(tmp_path / "web/train") == contents(tmp_path / "both/web/train")
    Domain(tmp_path / "web").check("train")


def test_another_tokenizer_cannot_be_added(jsonl: Write, tmp_path: Path) -> None:
    prepare([jsonl(make_texts(30, 0))], tmp_path, "web", "byte", holdout=0)
    before = contents(tmp_path / "web")
    with pytest.raises(UserError, match="web has the tokenizer byte, not mixtral: leave out --tokenizer"):
        Preparation([jsonl(make_texts(30, 0), "b.jsonl")], tmp_path, "web", "mixtral", append=True).run()
    shutil.rmtree(tmp_path / "web/.work")
    assert contents(tmp_path / "web") == before
