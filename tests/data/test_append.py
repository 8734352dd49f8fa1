"""Documents that are added to a domain keep the domain's rules. `test_sources.py` has more tests of additions."""

import json
from pathlib import Path

import pytest

from seqarch import cli
from seqarch.data.prepare import Preparation
from seqarch.data.shards import Domain
from seqarch.errors import UserError
from tests.data.test_prepare import contents, texts_of


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
