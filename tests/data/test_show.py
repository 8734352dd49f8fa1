import json
import shutil
from pathlib import Path

import pytest

from seqarch.data.prepare import prepare
from seqarch.data.show import show
from seqarch.errors import UserError
from tests.data.conftest import write_jsonl


def test_the_table_has_every_split(shards: Path) -> None:
    rows = [line.split() for line in show(shards).splitlines()]
    assert rows[0][:4] == ["domain", "split", "documents", "tokens"]
    for name in ("web", "code", "far"):
        for split in ("train", "holdout"):
            (row,) = [row for row in rows if row[:2] == [name, split]]
            assert row[-1] == "byte"
            assert int(row[2].replace(",", "")) > 0


def test_a_sample_is_decoded_document_by_document(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "news.jsonl", ["a naïve reader\nreads", "on"])
    prepare([file], tmp_path / "out", "web", "byte", holdout=0)
    shown = show(tmp_path / "out" / "web")
    assert "web, train, from news.jsonl lines 1-2:\n    a naïve reader\n    reads\n    ---\n    on\n" in shown
    assert "-0.000" not in shown  # the empty hold-out


def test_a_folder_without_domains(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no prepared domain in .*: prepare one with `seqarch data prepare FILE --out F"
    ):
        show(tmp_path)
    with pytest.raises(UserError, match=r"there is no folder .*absent': prepare one"):
        show(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(
        UserError, match=r"there is no folder .*notes\.txt' \(a file\): prepare one .* --out FOLDER --domain"
    ):
        show(tmp_path / "notes.txt")


def test_the_name_of_a_damaged_file_does_not_change_the_terminal(shards: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(shards / "web", tmp_path / "web"))
    manifest = json.loads((copy / "manifest.json").read_text())
    for split in ("train", "holdout"):
        manifest["splits"][split]["files"] = {}
        path = copy / split / "index.json"
        index = json.loads(path.read_text())
        index["chunks"][0]["filename"] = "\x1b[2J"
        path.write_text(json.dumps(index))
    (copy / "manifest.json").write_text(json.dumps(manifest))
    shown = show(copy)
    assert f"damaged: {copy}/holdout/index.json is not the index of" in shown
    assert "it names ?[2J, which lies elsewhere" in shown
    assert "\x1b" not in shown
