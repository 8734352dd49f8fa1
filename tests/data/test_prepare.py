import dataclasses
import gzip
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqarch.data import prepare as module
from seqarch.data import sources, tokenize
from seqarch.data.manifest import Manifest, Split
from seqarch.data.prepare import prepare
from seqarch.data.select import Select
from seqarch.data.shards import Domain
from seqarch.data.tokenizers import load_tokenizer
from seqarch.errors import UserError
from tests.data.conftest import make_texts

Write = Callable[..., Path]


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def tokens_of(folder: Path, split: Split) -> list[int]:
    """All tokens of a split."""
    sequences = Domain(folder).sequences(split, 1)
    return [int(sequences[i]) for i in range(len(sequences))]


def texts_of(folder: Path, split: Split) -> list[str]:
    """The documents of a split, decoded."""
    tokens = tokens_of(folder, split)
    ends = [i for i, token in enumerate(tokens) if token == 256]
    starts = [0, *(end + 1 for end in ends)]
    return [bytes(tokens[start:end]).decode() for start, end in zip(starts, ends, strict=False)]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_documents_come_back_in_order_and_once(jsonl: Write, tmp_path: Path) -> None:
    texts = make_texts(60, 0)
    manifest = prepare([jsonl(texts)], tmp_path / "out", "web", "byte", holdout=0.3)
    train, held_out = (texts_of(tmp_path / "out" / "web", split) for split in ("train", "holdout"))
    assert sorted(train + held_out) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]
    assert held_out == [text for text in texts if text in set(held_out)]
    assert 5 < len(held_out) < 30
    assert manifest.splits["train"].documents == len(train)
    assert manifest.splits["holdout"].text_bytes == sum(len(text.encode()) for text in held_out)


def test_the_manifest_says_what_is_on_disk(jsonl: Write, tmp_path: Path) -> None:
    prepare([jsonl(make_texts(60, 0), "news.jsonl")], tmp_path / "out", "web", "byte", holdout=0.3)
    folder = tmp_path / "out" / "web"
    manifest = Domain(folder).manifest
    assert (manifest.domain, manifest.tokenizer, manifest.text_field, manifest.holdout) == ("web", "byte", "text", 0.3)
    assert manifest.sources[0].file == "news.jsonl"
    assert manifest.sources[0].bytes == (tmp_path / "news.jsonl").stat().st_size
    tokens = np.array(tokens_of(folder, "holdout"))
    summary = manifest.splits["holdout"]
    assert summary.tokens == len(tokens)
    shares = np.bincount(tokens)[np.bincount(tokens) > 0] / len(tokens)
    assert summary.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum())
    assert Manifest.read(folder / "manifest.json") == manifest
    assert not (folder / ".work").exists()


def test_all_formats_hold_the_same(jsonl: Write, tmp_path: Path) -> None:
    texts = make_texts(40, 0)
    plain = jsonl(texts, "plain.jsonl")
    files = [plain, tmp_path / "packed.jsonl.zst", tmp_path / "packed.jsonl.gz", tmp_path / "table.parquet"]
    raw = plain.read_bytes()
    # Two zstd frames: what `cat a.zst b.zst` gives, and what parallel compressors write.
    files[1].write_bytes(zstd(raw[:500]) + zstd(raw[500:]))
    files[2].write_bytes(gzip.compress(raw, mtime=0))
    pq.write_table(pa.table({"id": range(40), "text": texts}), files[3], row_group_size=7)
    digests = set()
    for file in files:
        manifest = prepare([file], tmp_path / "out", file.name.replace(".", "-"), "byte", holdout=0.3)
        digests.add(tuple(manifest.splits[split].sha256 for split in ("train", "holdout")))
    assert len(digests) == 1


def test_row_groups_of_parquet_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces depend on the amount of text, and the file is opened once."""
    texts = [f"{number} " * 20 for number in range(300)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "many.parquet", row_group_size=1)
    opened, file = [], pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda path: opened.append(path) or file(path))
    pieces = list(sources.cut([tmp_path / "many.parquet"], Select("text")))
    assert [each.text for piece in pieces for each in sources.documents(piece, Select("text"))] == texts
    assert len(opened) == len(pieces) == 1
    monkeypatch.setattr(sources, "PIECE_BYTES", 1 << 10)
    assert 10 < len(list(sources.cut([tmp_path / "many.parquet"], Select("text")))) < 300


@pytest.mark.commands
@pytest.mark.usefixtures("small_pieces")
def test_the_number_of_workers_changes_nothing(jsonl: Write, tmp_path: Path) -> None:
    files = [jsonl(make_texts(60, seed), f"{seed}.jsonl") for seed in range(2)]
    for workers in (1, 3):
        prepare(files, tmp_path / str(workers), "web", "byte", holdout=0.2, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


@pytest.mark.usefixtures("small_pieces")
def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(
    jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = jsonl(make_texts(80, 0))
    prepare([file], tmp_path / "whole", "web", "byte", holdout=0.2, workers=1)
    tokenized: list[int] = []
    run_piece = tokenize.tokenize_piece

    def stop_after_three(piece: sources.Piece, **options) -> int:
        if len(tokenized) == 3:
            raise KeyboardInterrupt
        tokenized.append(piece.index)
        return run_piece(piece, **options)

    monkeypatch.setattr(tokenize, "tokenize_piece", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        prepare([file], tmp_path / "out", "web", "byte", holdout=0.2, workers=1)
    work = tmp_path / "out" / "web" / ".work"
    kept = {path.name: path.stat().st_mtime_ns for path in work.glob("piece-*.npz")}
    assert len(kept) == 3
    written: list[str] = []
    monkeypatch.setattr(tokenize, "tokenize_piece", run_piece)
    monkeypatch.setattr(os, "replace", _recording(os.replace, written))
    prepare([file], tmp_path / "out", "web", "byte", holdout=0.2, workers=1)
    assert "going on after an interruption" in capsys.readouterr().out
    assert written
    assert not set(written) & set(kept)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_file_that_is_named_twice_is_refused(jsonl: Write, tmp_path: Path) -> None:
    file = jsonl(make_texts(60, 0))
    again = file.parent / ".." / file.parent.name / file.name
    with pytest.raises(UserError, match=f"{again} is named twice: name each file once"):
        prepare([file, again], tmp_path / "out", "web", "byte")
    assert not (tmp_path / "out").exists()


def test_a_file_that_grows_while_it_is_read_gives_no_domain(
    jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out, sha256_of = jsonl(make_texts(60, 0)), tmp_path / "out", module.source_sha256

    def grow(path: Path) -> str:
        checksum = sha256_of(path)
        with path.open("a") as stream:
            stream.write('{"text": "more"}\n')
        return checksum

    monkeypatch.setattr(module, "source_sha256", grow)
    with pytest.raises(UserError, match="changed while it was read: repeat the command once the file is complete"):
        prepare([file], out, "web", "byte", holdout=0.3)
    assert not (out / "web" / "manifest.json").exists()
    monkeypatch.setattr(module, "source_sha256", sha256_of)
    assert sum(split.documents for split in prepare([file], out, "web", "byte", holdout=0.3).splits.values()) == 61


def test_a_damaged_piece_is_named(jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again() -> None:
        prepare([jsonl(make_texts(80, 0))], tmp_path / "out", "web", "byte", holdout=0.2, workers=1)

    with monkeypatch.context() as patch:
        patch.setattr(module, "assemble", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            again()
    piece = tmp_path / "out/web/.work/piece-000000.npz"
    content = bytearray(piece.read_bytes())
    content[len(content) // 2] ^= 1
    piece.write_bytes(content)
    with pytest.raises(UserError, match=r"piece-000000\.npz is damaged"):
        again()


@pytest.mark.usefixtures("small_pieces")
def test_a_killed_run_goes_on_between_finished_pieces(
    jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After SIGKILL while the fourth piece is written, the first three are not made again."""
    file = jsonl(make_texts(80, 0))
    prepare([file], tmp_path / "whole", "web", "byte", holdout=0.2, workers=1)
    save, saved = np.savez, []

    def kill_in_the_fourth(target, **arrays) -> None:
        if len(saved) == 3:
            target.write(b"half of it")
            target.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        saved.append(target)
        save(target, **arrays)

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", kill_in_the_fourth)
        arguments = ([file], tmp_path / "out", "web", "byte")
        options = {"holdout": 0.2, "workers": 1}
        killed = multiprocessing.get_context("fork").Process(target=prepare, args=arguments, kwargs=options)
        killed.start()
        killed.join()
    assert killed.exitcode == -signal.SIGKILL
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/web/.work").glob("piece-??????.npz")}
    assert len(kept) == 3
    rmtree, found = shutil.rmtree, {}

    def look_first(folder: Path, **options) -> None:
        found.update({path: path.stat().st_mtime_ns for path in Path(folder).glob("piece-*.npz")})
        rmtree(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", look_first)
    prepare([file], tmp_path / "out", "web", "byte", holdout=0.2, workers=1)
    assert "going on after an interruption" in capsys.readouterr().out
    assert len(found) > 4
    assert found.items() >= kept.items()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_run_that_was_killed_after_its_last_file_leaves_nothing_behind(
    jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = jsonl(make_texts(40, 0)), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: None)
        prepare([file], out, "web", "byte", holdout=0.2, workers=1)
    assert (out / "web/.work").is_dir()
    prepare([file], out, "web", "byte", holdout=0.2, workers=1)
    assert "prepared already" in capsys.readouterr().out
    assert not (out / "web/.work").exists()


def _recording(replace: Callable, written: list[str]) -> Callable:
    def record(source: Path, target: Path) -> None:
        written.append(Path(target).name)
        replace(source, target)

    return record


def test_unfinished_pieces_of_other_inputs_are_not_used(
    jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    file = jsonl(make_texts(40, 0))
    with monkeypatch.context() as patch:
        patch.setattr(module, "assemble", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare([file], tmp_path / "out", "web", "byte", holdout=0.2)
    texts = make_texts(40, 1)
    prepare([jsonl(texts)], tmp_path / "out", "web", "byte", holdout=0.2)
    folder = tmp_path / "out" / "web"
    assert sorted(texts_of(folder, "train") + texts_of(folder, "holdout")) == sorted(texts)


def test_preparing_again_does_nothing(jsonl: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = jsonl(make_texts(40, 0))
    prepare([file], tmp_path / "out", "web", "byte", holdout=0.2)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    prepare([file], tmp_path / "out", "web", "byte", holdout=0.2)
    assert "prepared already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer": "mixtral"}, "tokenizer"),
        ({"holdout": 0.4}, "holdout"),
        ({"texts": 1}, "sources"),
        ({"min_tokens": 9}, "min_tokens"),
    ],
)
def test_preparing_over_other_inputs_is_refused(jsonl: Write, tmp_path: Path, change: dict, named: str) -> None:
    prepare([jsonl(make_texts(40, 0))], tmp_path / "out", "web", "byte", holdout=0.2)
    before = contents(tmp_path / "out")
    options = {"texts": 0, "tokenizer": "byte", "holdout": 0.2, **change}
    files = [jsonl(make_texts(40, options.pop("texts")))]
    with pytest.raises(UserError, match=f"prepared from other inputs \\({named}\\)"):
        prepare(files, tmp_path / "out", "web", **options)
    assert contents(tmp_path / "out") == before


def test_a_foreign_folder_is_left_alone(jsonl: Write, tmp_path: Path) -> None:
    (tmp_path / "out" / "web" / "train").mkdir(parents=True)
    (tmp_path / "out" / "web" / "train" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not a prepared domain"):
        prepare([jsonl(make_texts(40, 0))], tmp_path / "out", "web", "byte")
    assert contents(tmp_path / "out") == {"web/train/mine.txt": b"mine"}


def test_a_link_in_an_unfinished_domain_is_not_followed(jsonl: Write, tmp_path: Path) -> None:
    for name in ("elsewhere", "out/a/.work"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "out/a/train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="out/a/train is a link that leads out of the folder"):
        prepare([jsonl(["a", "b"])], tmp_path / "out", "a", "byte", workers=1)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_domain_that_is_itself_a_link_is_not_followed(jsonl: Write, tmp_path: Path) -> None:
    for name in ("elsewhere", "disk"):
        (tmp_path / name).mkdir()
    (tmp_path / "out").symlink_to("disk")  # the user named it, so it may be a link
    (tmp_path / "out/a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="out/a is a link that leads out of the folder"):
        prepare([jsonl(["a", "b"])], tmp_path / "out", "a", "byte", workers=1)
    assert not list((tmp_path / "elsewhere").iterdir())
    prepare([jsonl(["a", "b"])], tmp_path / "out", "b", "byte", holdout=0, workers=1)
    assert (tmp_path / "disk/b/manifest.json").is_file()


def test_two_processes_do_not_prepare_one_domain(jsonl: Write, tmp_path: Path) -> None:
    import filelock

    work = tmp_path / "out" / "web" / ".work"
    work.mkdir(parents=True)
    with filelock.FileLock(work / "lock"), pytest.raises(UserError, match="another process is preparing"):
        prepare([jsonl(make_texts(40, 0))], tmp_path / "out", "web", "byte")


def test_a_domain_that_another_process_finishes_before_the_lock_is_kept(
    jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = jsonl(make_texts(40, 0)), tmp_path / "out"
    look = module.is_domain

    def look_then_wait(folder: Path) -> bool:
        found = look(folder)
        monkeypatch.undo()
        prepare([file], out, "web", "byte", holdout=0.5)
        return found

    monkeypatch.setattr(module, "is_domain", look_then_wait)
    with pytest.raises(UserError, match=r"prepared from other inputs \(holdout\)"):
        prepare([file], out, "web", "byte", holdout=0.2)
    assert Domain(out / "web").manifest.holdout == 0.5


def test_copies_of_a_document_fall_on_one_side(jsonl: Write, tmp_path: Path) -> None:
    texts = make_texts(40, 0)
    prepare([jsonl(texts), jsonl(texts[::-1], "again.jsonl")], tmp_path / "out", "web", "byte", holdout=0.3)
    train, held_out = (set(texts_of(tmp_path / "out" / "web", split)) for split in ("train", "holdout"))
    assert train | held_out == set(texts)
    assert not train & held_out


def test_empty_documents_and_blank_lines_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two"}')
    manifest = prepare([file], tmp_path / "out", "web", "byte", holdout=0)
    assert manifest.empty_documents == 1
    assert texts_of(tmp_path / "out" / "web", "train") == ["one", "two"]
    assert Domain(tmp_path / "out" / "web").describe("train", 0, 8) == "some.jsonl lines 1, 4"


def test_a_domain_that_is_all_held_out_says_so(jsonl: Write, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for holdout, said in ((1, "(all held out, none to train on)"), (0.5, " held out)")):
        prepare([jsonl(make_texts(20, 0))], tmp_path / str(holdout), "web", "byte", holdout=holdout, workers=1)
        assert said in capsys.readouterr().out


def test_documents_are_selected_by_their_tokens(
    jsonl: Write, tmp_path: Path, small_pieces: None, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"{length:04d}".ljust(length, ".") for length in range(90, 110)]
    options: dict[str, Any] = {"holdout": 0, "min_tokens": 96, "max_tokens": 105, "workers": 1}
    manifest = prepare([jsonl(texts)], tmp_path / "out", "web", "byte", **options)
    assert texts_of(tmp_path / "out" / "web", "train") == texts[5:15], "95 to 104 bytes and a token that ends them"
    assert (manifest.short_documents, manifest.long_documents, manifest.empty_documents) == (5, 5, 0)
    assert (manifest.min_tokens, manifest.max_tokens) == (96, 105)
    assert Domain(tmp_path / "out" / "web").manifest == manifest
    assert "; left out: 5 too short, 5 too long" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no document in train of .*left out: 20 too short"):
        prepare([jsonl(texts)], tmp_path / "out", "none", "byte", min_tokens=200, workers=1)


def test_shard_files_of_limited_size(jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = make_texts(40, 0)
    file = jsonl(texts)
    whole = prepare([file], tmp_path / "whole", "web", "byte", holdout=0)
    monkeypatch.setattr("seqarch.data.assemble.CHUNK_TOKENS", 1000)
    parts = prepare([file], tmp_path / "parts", "web", "byte", holdout=0)
    for split, summary in whole.splits.items():
        assert dataclasses.replace(parts.splits[split], files={}) == dataclasses.replace(summary, files={})
    folder = tmp_path / "parts" / "web"
    assert len(list((folder / "train").glob("chunk-*.bin"))) == -(-whole.splits["train"].tokens // 1000)
    assert tokens_of(folder, "train") == tokens_of(tmp_path / "whole" / "web", "train")
    sequences = Domain(folder).sequences("train", 300)
    stream = tokens_of(folder, "train")
    for i in range(len(sequences)):
        start, stop = sequences.token_range(i)
        assert sequences[i].tolist() == stream[start:stop]


def test_every_document_can_be_named(jsonl: Write, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    texts = [make_texts(20, 0), make_texts(20, 1)]
    files = [jsonl(texts[0], "a/text.jsonl"), jsonl(texts[1], "b/text.jsonl")]
    prepare(files, tmp_path / "out", "web", "byte", holdout=0.3)
    domain = Domain(tmp_path / "out" / "web")
    position = 0
    for text in texts_of(domain.folder, "train"):
        end = position + len(text.encode()) + 1
        name = domain.describe("train", position, end)
        assert domain.describe("train", end - 1, end) == name
        file = 0 if text in texts[0] else 1
        assert name == f"{'ab'[file]}/text.jsonl line {texts[file].index(text) + 1}"
        position = end
    everything = domain.describe("train", 0, position)
    assert everything.startswith("a/text.jsonl lines ")
    assert ", b/text.jsonl lines " in everything


def test_mixtral_tokens(jsonl: Write, tmp_path: Path) -> None:
    texts = make_texts(6, 0)
    prepare([jsonl(texts)], tmp_path / "out", "web", "mixtral", holdout=0)
    tokenizer = load_tokenizer("mixtral")
    assert tokens_of(tmp_path / "out" / "web", "train") == [
        token for text in texts for token in [*tokenizer.encode(text), 2]
    ]
