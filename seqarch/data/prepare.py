"""From text files to shards: read, tokenise in parallel, split by document, write.

Finished pieces are kept in a work folder until the manifest is written, so an interrupted run resumes where it stopped.
The result depends only on the inputs: neither on the number of workers nor on interruptions.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.data.manifest import SPLITS, Manifest, Source, Split, SplitSummary, check_name
from seqarch.data.remote import is_remote, mirror, origin, upload
from seqarch.data.shards import (
    BLOCKS,
    DOCUMENT,
    DOCUMENTS,
    INDEX,
    MANIFEST,
    PLAIN_TOKENS,
    Domain,
    block_checksums,
    is_domain,
)
from seqarch.data.sources import CUT, PIECE_BYTES, Piece, check_files, cut, documents
from seqarch.data.tokenizers import Tokenizer, load_tokenizer
from seqarch.data.verified import remember, sha256_of
from seqarch.data.workers import worker_pool
from seqarch.errors import UserError, check_counts, say
from seqarch.runs.files import check_folder, locked, read_arrays, write_arrays, write_text
from seqarch.safe_yaml import is_word

CHUNK_TOKENS = 1 << 25
"""Tokens in a shard file (64 MiB), all but the last of a split."""

_INDEX_CONFIG: dict[str, Any] = {
    **dict.fromkeys(("chunk_size", "compression", "compression_batch_size", "compression_level", "encryption")),
    "ipc_compression": None,
    "data_format": ["no_header_tensor:20"],  # litdata's number of uint16
    "data_spec": PLAIN_TOKENS,
    "item_loader": "TokensLoader",
    "types": "tensor",
}
"""What litdata 0.2.76 writes into the index of such shards, without `chunk_bytes`."""

COUNTED = 1 << 20
"""Tokens that are counted at once: numpy takes four times their memory."""

_BATCH_CHARACTERS = 1 << 20
"""Text handed to the tokenizer at once."""


_INPUTS = ("tokenizer", "text_field", "holdout", "sources", "min_tokens", "max_tokens")
"""What the result depends on, in addition to the code."""


def prepare(
    files: Sequence[str | Path],
    out: str | Path,
    domain: str,
    tokenizer: str = "mixtral",
    *,
    text_field: str = "text",
    holdout: float = 0.02,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    workers: int | None = None,
) -> Manifest:
    """Tokenise `files` into the shards `out/domain`, and say what came out.

    A document falls into the hold-out by the hash of its text, so exact copies fall on one side. Documents keep the
    order of the files. Empty ones are left out and counted. A domain prepared from the same inputs stays as it is.

    Args:
        files: JSONL (plain, .gz or .zst) or Parquet files.
        out: folder of all domains, or a URL of object storage such as s3://bucket/shards.
        domain: name of the domain that is written.
        tokenizer: 'byte' or 'mixtral'.
        text_field: field or column that holds the text.
        holdout: share of the documents that is held out, 0 to 1.
        min_tokens: leave out documents with fewer tokens; the token that ends a document counts.
        max_tokens: leave out documents with more tokens.
        workers: processes; by default as many as there are cores.

    Raises:
        UserError: an input is wrong (the file and line are named), the domain was prepared from other inputs, another
            process is preparing it, or a split would be empty.
    """
    check_counts(workers=workers, min_tokens=min_tokens, max_tokens=max_tokens)
    paths = [Path(file) for file in files]
    _check(paths, domain, tokenizer, holdout, min_tokens, max_tokens)
    folder = _folder(out, domain)
    inputs = tokenizer, text_field, holdout, _describe(paths)
    job = Manifest(domain, *inputs, min_tokens=min_tokens, max_tokens=max_tokens)
    if is_domain(folder):
        return _already_prepared(folder, job)
    with _locked(folder) as work:
        if is_domain(folder):  # another process prepared it in the meantime
            return _already_prepared(folder, job)
        _resume_or_start_over(work, job)
        _tokenize(job, paths, work, workers or os.cpu_count() or 1)
        manifest = _assemble(job, folder, work)
        _publish(folder, manifest)
    shutil.rmtree(work)
    say(summary(manifest))
    return manifest


def _check(paths: list[Path], domain: str, tokenizer: str, holdout: float, least: int | None, most: int | None) -> None:
    """Refuse wrong inputs before any work."""
    check_name(domain)
    if not is_word(domain):
        raise UserError(f"recipes read '{domain}' as another value (YAML): choose a domain name that is only a word")
    load_tokenizer(tokenizer).encode("")
    if not 0 <= holdout <= 1:
        raise UserError(f"holdout must lie between 0 and 1, not {holdout}")
    if least and most and least > most:
        raise UserError(f"min_tokens must be at most max_tokens, not {least:,} with {most:,}")
    check_files(paths)


def _folder(out: str | Path, domain: str) -> Path:
    """The folder of the domain's shards, unless something else is in it."""
    folder = (mirror(str(out)) if is_remote(out) else Path(out)) / domain
    ours = is_domain(folder) or origin(folder) or (folder / ".work").is_dir()
    if not ours and folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not a prepared domain: choose another domain or output folder")
    return folder


def summary(manifest: Manifest) -> str:
    """One line: documents and tokens of a domain."""
    train, held_out = (manifest.splits[split] for split in SPLITS)
    return (
        f"{manifest.domain}: {train.documents + held_out.documents:,} documents, {train.tokens + held_out.tokens:,} "
        f"{manifest.tokenizer} tokens ({held_out.tokens:,} held out){_left_out(manifest)}"
    )


def _left_out(manifest: Manifest) -> str:
    counts = {
        "empty": manifest.empty_documents,
        f"of fewer than {manifest.min_tokens or 0:,} tokens": manifest.short_documents,
        f"of more than {manifest.max_tokens or 0:,} tokens": manifest.long_documents,
    }
    found = [f"{count:,} {which}" for which, count in counts.items() if count]
    return f"; left out: {', '.join(found)}" if found else ""


def _publish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and all files to object storage if the folder is a mirror, which keeps the hold-out only."""
    for path in sorted(path for split in SPLITS for path in (folder / split).iterdir()):
        upload(path)
        if origin(folder) and path.parent.name == "train":
            path.unlink()
    write_text(folder / MANIFEST, manifest.to_json())
    upload(folder / MANIFEST)


def _describe(paths: Sequence[Path]) -> tuple[Source, ...]:
    """Names, relative to the folder that the files share, with sizes and checksums."""
    parents = [path.resolve().parent for path in paths]
    shared = Path(os.path.commonpath(parents))
    names = [(parent / path.name).relative_to(shared).as_posix() for path, parent in zip(paths, parents, strict=True)]
    return tuple(Source(name, path.stat().st_size, sha256_of(path)) for name, path in zip(names, paths, strict=True))


def _already_prepared(folder: Path, job: Manifest) -> Manifest:
    manifest = Domain(folder).manifest
    differing = [field for field in _INPUTS if getattr(manifest, field) != getattr(job, field)]
    if differing:
        raise UserError(
            f"{folder} was prepared from other inputs ({', '.join(differing)} differ): remove it to prepare it anew, "
            "or choose another domain name"
        )
    say(f"{summary(manifest)}: prepared already, nothing to do")
    return manifest


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """The work folder, while no other process has it."""
    check_folder(folder, folder.parent)  # the folder above is the one that the user named
    work = folder / ".work"
    work.mkdir(parents=True, exist_ok=True)
    with locked(work / "lock", f"another process is preparing {folder}"):
        yield work


def _resume_or_start_over(work: Path, job: Manifest) -> None:
    """Keep finished pieces of the same job; an unfinished other job leaves nothing worth keeping."""
    started = work / "job.json"
    inputs = json.dumps([CUT, PIECE_BYTES, dataclasses.asdict(job)], indent=2)
    if started.is_file() and started.read_text(encoding="utf-8") == inputs:
        say(f"{job.domain}: going on after an interruption")
        return
    for piece in work.glob("piece-*"):
        piece.unlink()
    write_text(started, inputs)


def _tokenize(job: Manifest, paths: Sequence[Path], work: Path, workers: int) -> None:
    """Leave `work/piece-*.npz` for each piece of the files."""
    total = sum(source.bytes for source in job.sources)
    pieces = cut(paths, job.text_field)
    run = functools.partial(_tokenize_piece, job=job, work=work)
    here = workers == 1 or total < PIECE_BYTES // 8
    with _progress() as progress:
        task = progress.add_task(job.domain, total=total)
        for consumed in map(run, pieces) if here else _run_in_order(run, pieces, workers):
            progress.update(task, completed=consumed)
        progress.update(task, completed=total)
    for path, source in zip(paths, job.sources, strict=True):
        if path.stat().st_size != source.bytes:
            raise UserError(f"{path} changed while it was read: repeat the command once the file is complete")


def _run_in_order(run: Callable[[Piece], int], pieces: Iterator[Piece], workers: int) -> Iterator[int]:
    """`run` of each piece, in a pool; the first error in the order of the files is the one that is raised."""
    waiting: collections.deque[concurrent.futures.Future[int]] = collections.deque()
    pool = worker_pool(workers)
    try:
        for piece in pieces:
            waiting.append(pool.submit(run, piece))
            if len(waiting) > 3 * workers:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _progress() -> Any:
    from rich import progress
    from rich.console import Console

    columns = progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn()
    shown = ("{task.description}", *columns, progress.TimeRemainingColumn())
    return progress.Progress(*shown, console=Console(stderr=True))


def _tokenize_piece(piece: Piece, *, job: Manifest, work: Path) -> int:
    """Tokens and documents of one piece, written atomically, unless they are there already; the bytes read so far."""
    path = work / f"piece-{piece.index:06d}.npz"
    if path.exists():
        return piece.consumed
    tokenizer = load_tokenizer(job.tokenizer)
    kept: dict[Split, list[tuple[int, np.ndarray, int]]] = {split: [] for split in SPLITS}
    empty = short = long = 0
    for batch in _batches(documents(piece, job.text_field)):
        filled = [(line, text) for line, text in batch if text]
        empty += len(batch) - len(filled)
        for (line, text), ids in zip(filled, tokenizer.encode_batch([text for _, text in filled]), strict=True):
            short += (too_short := len(ids) + 1 < (job.min_tokens or 0))
            long += (too_long := len(ids) + 1 > (job.max_tokens or math.inf))
            if too_short or too_long:
                continue
            encoded = text.encode()
            kept[_split_of(encoded, job.holdout)].append((line, ids, len(encoded)))
    end = np.array([tokenizer.eos_id], np.uint16)
    arrays: dict[str, Any] = {"left_out": np.array([empty, short, long]), "source": np.int64(piece.file)}
    for split, found in kept.items():
        parts = [part for _, ids, _ in found for part in (ids, end)]
        arrays[f"{split}_tokens"] = np.concatenate([np.empty(0, np.uint16), *parts])  # the only copy of a document
        arrays[f"{split}_rows"] = np.array([(line, len(ids) + 1) for line, ids, _ in found], np.int64).reshape(-1, 2)
        arrays[f"{split}_text_bytes"] = np.int64(sum(n_bytes for *_, n_bytes in found))
    write_arrays(path, arrays)
    return piece.consumed


def _batches(numbered: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch, characters = [], 0
    for line, text in numbered:
        batch.append((line, text))
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _split_of(text: bytes, holdout: float) -> Split:
    """The side of a document: its hash, read as a number in [0, 1), lies below the hold-out's share or not."""
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2.0**64
    return "holdout" if number < holdout else "train"


def _assemble(job: Manifest, folder: Path, work: Path) -> Manifest:
    """Put the pieces together into shards, in order."""
    tokenizer = load_tokenizer(job.tokenizer)
    writers: dict[Split, _SplitWriter] = {split: _SplitWriter(folder / split, tokenizer) for split in SPLITS}
    left_out = np.zeros(3, np.int64)
    for path in sorted(work.glob("piece-??????.npz")):
        piece = read_arrays(path)
        left_out += piece["left_out"]
        for split, writer in writers.items():
            rows, text_bytes = piece[f"{split}_rows"], int(piece[f"{split}_text_bytes"])
            writer.add(piece[f"{split}_tokens"], rows, int(piece["source"]), text_bytes)
    splits: dict[Split, SplitSummary] = {split: writer.close() for split, writer in writers.items()}
    empty, short, long = left_out.tolist()
    _check_splits(job, splits, empty, short + long)
    counts = {"empty_documents": empty, "short_documents": short, "long_documents": long}
    return dataclasses.replace(job, splits=splits, **counts)


def _check_splits(job: Manifest, splits: dict[Split, SplitSummary], empty: int, other: int) -> None:
    found = sum(split.documents for split in splits.values())
    names = ", ".join(source.file for source in job.sources)
    if not found:
        why = " of the requested length" if other else f": every text ({empty}) is empty" if empty else ""
        raise UserError(f"no document in {names}{why}")
    if job.holdout > 0 and not splits["holdout"].documents:
        raise UserError(f"none of the {found} documents fell into the hold-out of {job.holdout:g}: make it larger")
    if job.holdout < 1 and not splits["train"].documents:
        raise UserError(f"all of the {found} documents fell into the hold-out of {job.holdout:g}: make it smaller")


class _SplitWriter:
    """Writes the shards and the document index of one split."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._folder = folder
        self._index, self._blocks = (folder / DOCUMENTS).open("wb"), (folder / BLOCKS).open("wb")
        self._pending: list[np.ndarray] = []
        self._n_pending = 0
        self._chunks: list[dict[str, Any]] = []
        self._counts = np.zeros(tokenizer.vocab_size, np.int64)
        self._digest = hashlib.sha256()
        self._documents = self._tokens = self._text_bytes = 0

    def add(self, tokens: np.ndarray, rows: np.ndarray, file: int, text_bytes: int) -> None:
        """Append documents: their tokens, and for each its line and number of tokens."""
        entries = np.empty(len(rows), DOCUMENT)
        entries["offset"] = self._tokens + np.cumsum(rows[:, 1]) - rows[:, 1]
        entries["line"], entries["file"] = rows[:, 0], file
        self._index.write(entries.tobytes())
        for start in range(0, len(tokens), COUNTED):
            self._counts += np.bincount(tokens[start : start + COUNTED], minlength=len(self._counts))
        self._digest.update(tokens.astype("<u2", copy=False).data)
        self._documents += len(rows)
        self._tokens += len(tokens)
        self._text_bytes += text_bytes
        self._pending.append(tokens)
        self._n_pending += len(tokens)
        while self._n_pending >= CHUNK_TOKENS:
            self._flush(CHUNK_TOKENS)

    def _flush(self, n_tokens: int) -> None:
        """Write the first `n_tokens` pending tokens as a file in litdata's format: a header and one item."""
        pending = np.concatenate(self._pending) if len(self._pending) > 1 else self._pending[0]
        tokens = pending[:n_tokens].astype("<u2")
        name, n_bytes = f"chunk-0-{len(self._chunks)}.bin", 12 + tokens.nbytes
        header = np.array([1, 12, n_bytes], "<u4")  # items, where the first begins, where it ends
        (self._folder / name).write_bytes(header.tobytes() + tokens.tobytes())
        self._chunks.append({"chunk_bytes": n_bytes, "chunk_size": 1, "dim": n_tokens, "filename": name})
        self._blocks.write(np.array(block_checksums(tokens), "<u4").tobytes())
        self._pending = [pending[n_tokens:]]
        self._n_pending = len(pending) - n_tokens

    def close(self) -> SplitSummary:
        if self._n_pending:
            self._flush(self._n_pending)
        self._index.close()
        self._blocks.close()
        if self._chunks:
            config = {**_INDEX_CONFIG, "chunk_bytes": 2 * CHUNK_TOKENS + 64}
            index = json.dumps({"chunks": self._chunks, "config": config}, sort_keys=True)
            (self._folder / INDEX).write_text(index)
        files = {path.name: sha256_of(path) for path in sorted(self._folder.iterdir())}
        for name, checksum in files.items():
            remember([self._folder / name], checksum)
        used = self._counts[self._counts > 0] / max(1, self._tokens)
        entropy = -math.fsum(used * np.log(used))
        return SplitSummary(self._documents, self._tokens, self._text_bytes, entropy, self._digest.hexdigest(), files)
