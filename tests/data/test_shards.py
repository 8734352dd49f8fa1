import functools
import json
import math
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from seqarch.data.datamodule import TextDataModule
from seqarch.data.prepare import prepare
from seqarch.data.shards import Domain, list_domains, open_domain
from seqarch.errors import UserError


@pytest.fixture
def copy(shards: Path, tmp_path: Path) -> Path:
    """A copy of the domain web that a test may spoil."""
    return Path(shutil.copytree(shards / "web", tmp_path / "web"))


def test_domains_are_listed(shards: Path) -> None:
    assert list_domains(shards) == ["code", "far", "web"]


def test_what_is_not_there(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*absent"):
        open_domain(tmp_path / "absent", "web")
    with pytest.raises(UserError, match="no prepared domain in"):
        open_domain(tmp_path, "web")
    with pytest.raises(UserError, match="'wbe': did you mean web"):
        open_domain(shards, "wbe")


@pytest.mark.parametrize(
    "manifest", ["noise", "[" * 200_000, "[]", "{}", '{"format": 2, "sources": [], "splits": {}}'], ids=range(5)
)
def test_a_manifest_that_cannot_be_read(copy: Path, manifest: str) -> None:
    (copy / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match=r"manifest\.json is not a manifest of this version"):
        Domain(copy)


def test_a_manifest_of_another_format(copy: Path) -> None:
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(UserError, match="is not a manifest of this version"):
        Domain(copy)


@pytest.mark.parametrize("name", ["../../../secret", "/dev/zero", "..", ".", "", "a/b"])
def test_a_manifest_names_only_files_of_its_folder(copy: Path, name: str) -> None:
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"]["files"][name] = "-"
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json is not a manifest of this version"):
        Domain(copy)


@pytest.mark.parametrize("index", ["[" * 200_000, "[]", "noise"], ids=range(3))
def test_an_index_that_cannot_be_read(copy: Path, index: str) -> None:
    domain = Domain(copy)
    domain.manifest.splits["train"].files.clear()
    (copy / "train" / "index.json").write_text(index)
    with pytest.raises(UserError, match=r"train/index\.json is not the index of the tokens"):
        domain.sequences("train", 32)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ((), {"tokenizer": 3}),
        ((), {"sources": [{"file": 5, "bytes": 1, "sha256": ""}]}),
        ((), {"sources": 7}),
        ((), {"splits": []}),
        ((), {"empty_documents": "x"}),
        (("splits", "holdout"), {"unigram_entropy": 10**400}),
        (("splits", "holdout"), {"unigram_entropy": math.nan}),
        (("splits", "train"), {"tokens": "5"}),
        (("splits", "train"), {"documents": -1}),
        (("splits", "train"), {"files": []}),
    ],
)
def test_a_manifest_of_other_values(copy: Path, part: tuple[str, ...], change: dict) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    functools.reduce(dict.__getitem__, part, manifest).update(change)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json is not a manifest of this version"):
        Domain(copy)


@pytest.mark.parametrize(
    "change", [{"dim": 9.5}, {"dim": -5}, {"chunk_bytes": "a"}, {"chunk_size": -500}, {"chunk_size": 10**30}]
)
def test_an_index_of_other_values(copy: Path, change: dict) -> None:
    domain = Domain(copy)
    domain.manifest.splits["train"].files.clear()
    index = json.loads((copy / "train/index.json").read_text())
    index["chunks"][0].update(change)
    (copy / "train/index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"train/index\.json is not the index of the tokens"):
        domain.sequences("train", 32)


@pytest.mark.parametrize("rows", [b"\xff", b"\x7f"], ids=["negative", "large"])
def test_documents_that_lie_elsewhere(copy: Path, rows: bytes) -> None:
    domain = Domain(copy)
    domain.manifest.splits["train"].files.clear()
    path = copy / "train/documents.bin"
    path.write_bytes(rows * path.stat().st_size)
    with pytest.raises(UserError, match=r"train/documents\.bin is damaged"):
        domain.describe("train", 0, 9)


def test_object_storage_may_list_what_is_no_name(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqarch.data.shards.origin", lambda folder: "s3://bucket/shards")
    monkeypatch.setattr("seqarch.data.shards.folders", lambda folder: ["..", "web"])
    monkeypatch.setattr("seqarch.data.shards.is_domain", lambda folder: True)
    assert list_domains(shards) == ["web"]


def test_a_shard_file_cut_short(copy: Path) -> None:
    chunk = copy / "train" / "chunk-0-0.bin"
    chunk.write_bytes(chunk.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"chunk-0-0\.bin is missing or cut short"):
        Domain(copy).sequences("train", 32)


def test_sequences_tile_the_split(shards: Path) -> None:
    domain = open_domain(shards, "web")
    tokens = [int(token) for token in domain.sequences("train", 1)]
    assert len(tokens) == domain.manifest.splits["train"].tokens
    sequences = domain.sequences("train", 33)
    assert len(sequences) == len(tokens) // 33
    joined = [token for sequence in sequences for token in sequence.tolist()]
    assert joined == tokens[: len(joined)]
    with pytest.raises(IndexError):
        sequences[len(sequences)]


@pytest.fixture
def litdata(monkeypatch):
    """litdata from `build/litdata`, where `make test` puts it: an environment cannot have it without torchvision."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "build" / "litdata")
    return pytest.importorskip("litdata")


def test_litdata_reads_the_same(shards: Path, litdata) -> None:
    """The files are litdata's: any of its readers takes them."""
    sequences = open_domain(shards, "web").sequences("train", 33)
    dataset = litdata.StreamingDataset(
        str(sequences.shards.folder), item_loader=litdata.TokensLoader(block_size=sequences.length)
    )
    assert len(dataset) == len(sequences)
    assert all(torch.equal(dataset[i].long(), sequences[i]) for i in range(len(sequences)))


def test_litdata_writes_the_same(shards: Path, tmp_path: Path, monkeypatch, litdata) -> None:
    from litdata.streaming.writer import BinaryWriter

    monkeypatch.setattr("seqarch.data.assemble.CHUNK_TOKENS", 1000)
    prepare([shards.parent / "web.jsonl"], tmp_path / "ours", "web", "byte", holdout=0.2, workers=1)
    sequence = open_domain(tmp_path / "ours", "web").sequences("train", 1)
    tokens = torch.cat(list(sequence)).to(torch.uint16)
    writer = BinaryWriter(str(tmp_path / "theirs"), chunk_bytes=2 * 1000 + 64, item_loader=litdata.TokensLoader())
    for i, chunk in enumerate(tokens.split(1000)):
        writer[i] = chunk
    writer.done()
    theirs = {path.name.removeprefix("0."): path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    assert len(theirs) == len(tokens) // 1000 + 2
    assert theirs == {name: (sequence.shards.folder / name).read_bytes() for name in theirs}


@pytest.mark.parametrize("name", ["blocks.bin", "chunk-0-0.bin"])
@pytest.mark.parametrize("spoil", [os.unlink, lambda path: os.truncate(path, 0)], ids=["removed", "cut"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_goes_while_it_is_read(copy: Path, name: str, spoil: Any, workers: int) -> None:
    data = TextDataModule(str(copy.parent), {"web": 1.0}, sequence_length=64, num_workers=workers)
    before = multiprocessing.active_children()
    batches = iter(data.train_dataloader())
    next(batches)
    spoil(copy / "train" / name)
    with pytest.raises(UserError, match=f"{name} is missing or cut short; restore it"):
        list(batches)
    assert [each for each in multiprocessing.active_children() if each not in before] == []


def test_documents_that_go_while_they_are_read(copy: Path) -> None:
    domain = Domain(copy)
    before = domain.describe("train", 0, 9)
    os.truncate(copy / "train/documents.bin", 0)
    assert domain.describe("train", 0, 9) == before
