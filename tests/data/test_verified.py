"""Damaged shards are found and named. Shards that were compared before cost nothing."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from seqarch import cli
from seqarch.data import verified
from seqarch.data.datamodule import TextDataModule
from seqarch.data.manifest import Split
from seqarch.data.shards import BLOCK, BLOCKS, INDEX, Domain
from seqarch.data.show import check, show
from seqarch.errors import UserError

LENGTH = 33


@pytest.fixture
def copy(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with the domain `web`, which a test may spoil. None of its files was compared before."""
    monkeypatch.setattr(verified, "memory_folder", lambda: tmp_path / "memory")
    monkeypatch.setattr(verified, "_matched", {})
    shutil.copytree(shards / "web", tmp_path / "root" / "web")
    return tmp_path / "root"


def flip(path: Path, position: int = -1) -> None:
    """Flip the lowest bit of one byte."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def forget(root: Path, what: str | None = "files") -> None:
    """Make a manifest as older versions wrote it: without checksums of files, or of blocks of tokens."""
    path = root / "web" / "manifest.json"
    fields = json.loads(path.read_text())
    for split in fields["splits"].values():
        if what == "files":
            del split["files"]
        elif what == "blocks":
            del split["files"][BLOCKS]
    path.write_text(json.dumps(fields))


def read(root: Path, split: Split = "train") -> torch.Tensor:
    return Domain(root / "web").sequences(split, LENGTH)[0]


def data(root: Path, workers: int) -> TextDataModule:
    module = TextDataModule(str(root), {"web": 1.0}, sequence_length=16, sequences_per_step=4, num_workers=workers)
    module.setup("fit")
    return module


@pytest.mark.parametrize("old", [None, "blocks", "files"])
def test_a_flipped_bit_of_a_shard(copy: Path, old: str | None) -> None:
    forget(copy, old)
    read(copy)
    flip(copy / "web" / "train" / "chunk-0-0.bin", 60)
    with pytest.raises(UserError, match=r"web/train.* is damaged: .* checksum in the manifest; restore .* prepare"):
        read(copy)


def test_a_bit_that_flips_between_two_reads(copy: Path) -> None:
    """Each read compares exactly what it reads, whatever the file's time of change is."""
    sequences = Domain(copy / "web").sequences("train", LENGTH)
    first, last = sequences[0], sequences[len(sequences) - 1]
    chunk = copy / "web" / "train" / "chunk-0-0.bin"
    assert chunk.stat().st_size > 4 * BLOCK
    stat = chunk.stat()
    flip(chunk, 12 + 2 * (LENGTH - 1))
    os.utime(chunk, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(UserError, match=r"chunk-0-0\.bin is damaged"):
        sequences[0]
    assert torch.equal(sequences[len(sequences) - 1], last)
    flip(chunk, 12 + 2 * (LENGTH - 1))
    assert torch.equal(sequences[0], first)


@pytest.mark.parametrize("workers", [0, 1])
def test_training_says_it_in_one_line(copy: Path, workers: int) -> None:
    chunk = copy / "web" / "train" / "chunk-0-0.bin"
    for position in range(12, chunk.stat().st_size, 2 * BLOCK):
        flip(chunk, position)
    with pytest.raises(UserError) as error:
        next(iter(data(copy, workers).train_dataloader()))
    assert str(error.value).startswith(str(copy / "web" / "train" / "chunk-0-0.bin"))
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("old", ["blocks", "files"])
def test_a_file_without_checksums_of_blocks_is_compared_once(
    copy: Path, monkeypatch: pytest.MonkeyPatch, old: str
) -> None:
    """A later process, which knows only the disk, compares too. It reads a file again if it was written since."""
    forget(copy, old)
    read(copy)
    monkeypatch.setattr(verified, "_matched", {})
    chunk = copy / "web" / "train" / "chunk-0-0.bin"
    stat = chunk.stat()
    flip(chunk)
    os.utime(chunk, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    read(copy)
    os.utime(chunk, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(UserError, match="is damaged"):
        read(copy)


def test_the_cache_may_be_a_link(copy: Path, tmp_path: Path) -> None:
    """It is the user's own folder, and may lie on another disk."""
    forget(copy, "blocks")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "memory").symlink_to(tmp_path / "elsewhere")
    read(copy)
    assert list((tmp_path / "elsewhere").iterdir())


def test_no_place_to_note_a_match(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("in the way")
    assert len(read(copy)) == LENGTH


@pytest.mark.parametrize("name", ["chunk-0-0.bin", "index.json", "documents.bin", BLOCKS])
@pytest.mark.parametrize("damage", ["removed", "cut", "emptied", "flipped"])
def test_each_file_of_a_split(copy: Path, name: str, damage: str) -> None:
    path = copy / "web" / "holdout" / name
    content = path.read_bytes()
    path.unlink()
    if damage == "flipped":
        path.write_bytes(content)
        flip(path, len(content) // 2)
    elif damage != "removed":
        path.write_bytes(content[: -len(content) // 2] if damage == "cut" else b"")
    with pytest.raises(UserError, match=rf"holdout/{name} is (damaged|missing or cut short)"):
        data(copy, 0).evaluation_sets()
    assert f"damaged: {path}" in show(copy)
    with pytest.raises(UserError, match=rf"holdout/{name} is (damaged|missing or cut short)"):
        check(copy)


def test_an_old_domain_whose_index_is_damaged(copy: Path) -> None:
    forget(copy)
    index = copy / "web" / "train" / "index.json"
    index.write_text(index.read_text()[:50])
    with pytest.raises(UserError, match=r"index\.json is not the index of the tokens"):
        read(copy)


def test_an_index_with_other_shards_than_the_manifest(copy: Path) -> None:
    forget(copy)
    index = copy / "web" / "train" / "index.json"
    index.write_text(index.read_text().replace('"dim": 1', '"dim": 2'))
    with pytest.raises(UserError, match=r"index\.json is not the index .*: it lists .* tokens"):
        read(copy)


@pytest.mark.parametrize("old", [None, "files"])
def test_check_reads_what_is_known_to_match(copy: Path, old: str | None) -> None:
    forget(copy, old)
    assert check(copy).splitlines()[0].startswith("web, train: 4 files, ")
    chunk = copy / "web" / "train" / "chunk-0-0.bin"
    stat = chunk.stat()
    flip(chunk)
    os.utime(chunk, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(UserError, match="is damaged"):
        check(copy)


def test_the_command_that_checks(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["data", "check", str(copy)])
    assert "web, holdout: 4 files" in capsys.readouterr().out
    flip(copy / "web" / "train" / "chunk-0-0.bin")
    with pytest.raises(SystemExit) as stop:
        cli.main(["data", "check", str(copy)])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"seqarch: error: {copy}/web/train/chunk-0-0.bin is damaged")


def test_a_token_that_the_tokenizer_has_not(copy: Path) -> None:
    """The shard agrees with its manifest, so no checksum shows the damage."""
    chunk = copy / "web" / "train" / "chunk-0-0.bin"
    content = bytearray(chunk.read_bytes())
    content[12:14] = (300).to_bytes(2, "little")
    chunk.write_bytes(content)
    domain = Domain(copy / "web")
    summary = domain.manifest.splits["train"]
    files = {INDEX: summary.files[INDEX], chunk.name: verified.sha256_of(chunk)}
    domain.manifest.splits["train"] = dataclasses.replace(summary, files=files)
    with pytest.raises(UserError, match=r"chunk-0-0\.bin is not of the tokenizer .* lacks the token 300"):
        domain.sequences("train", LENGTH)[0]


def test_a_manifest_cut_short(copy: Path) -> None:
    path = copy / "web" / "manifest.json"
    path.write_text(path.read_text()[:100])
    for look in (show, check, lambda root: data(root, 0)):
        call: Callable[[Path], object] = look
        with pytest.raises(UserError, match=r"manifest\.json is not a manifest of this version"):
            call(copy)
