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
from seqarch.data.shards import MANIFEST, Domain, is_domain
from seqarch.data.sources import CUT, PIECE_BYTES, Piece, check_files, cut, documents
from seqarch.data.tokenizer_files import FOLDER, find_tokenizer, stored_tokenizer, write_tokenizer
from seqarch.data.tokenizers import Tokenizer
from seqarch.data.verified import sha256_of
from seqarch.data.workers import worker_pool
from seqarch.data.writer import SplitWriter
from seqarch.errors import UserError, check_counts, one_line, say
from seqarch.runs.files import check_folder, locked, read_arrays, write_arrays, write_text
from seqarch.safe_yaml import is_word

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
    eos_token: str | None = None,
    bos_token: str | None = None,
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
        tokenizer: 'byte', 'mixtral', a tokenizer.json, a SentencePiece, tiktoken or Tekken file, a folder with one of
            them, the name of a repository of the Hugging Face Hub, or of a plug-in's tokenizer.
        eos_token: the token that ends a document; by default the one that the tokenizer names.
        bos_token: the token that begins a document; by default the one that the tokenizer itself adds, if it does. ""
            is none.
        text_field: field or column that holds the text.
        holdout: share of the documents that is held out, 0 to 1.
        min_tokens: leave out documents with fewer tokens; the tokens that end and begin a document count.
        max_tokens: leave out documents with more tokens.
        workers: processes; by default as many as there are cores.

    Raises:
        UserError: an input is wrong (the file and line are named), the domain was prepared from other inputs, another
            process is preparing it, or a split would be empty.
    """
    check_counts(workers=workers, min_tokens=min_tokens, max_tokens=max_tokens)
    paths = [Path(file) for file in files]
    _check(paths, domain, holdout, min_tokens, max_tokens)
    found = find_tokenizer(tokenizer, eos_token, bos_token)
    found.encode("")
    folder = _folder(out, domain)
    inputs = found.name, text_field, holdout, _describe(paths)
    job = Manifest(domain, *inputs, min_tokens=min_tokens, max_tokens=max_tokens)
    return _carry_out(job, paths, folder, found, workers or os.cpu_count() or 1)


def _carry_out(job: Manifest, paths: list[Path], folder: Path, tokenizer: Tokenizer, workers: int) -> Manifest:
    """Prepare a domain, unless that has been done."""
    if is_domain(folder):
        return _already_prepared(folder, job)
    with _locked(folder) as work:
        if is_domain(folder):  # another process prepared it in the meantime
            return _already_prepared(folder, job)
        _resume_or_start_over(work, job)
        write_tokenizer(tokenizer, work / FOLDER)
        _tokenize(job, paths, work, workers)
        manifest = _assemble(job, folder, work)
        _publish(folder, manifest)
    shutil.rmtree(work)
    say(summary(manifest))
    return manifest


def _check(paths: list[Path], domain: str, holdout: float, least: int | None, most: int | None) -> None:
    """Refuse wrong inputs before any work."""
    check_name(domain)
    if not is_word(domain):
        raise UserError(f"recipes read '{domain}' as another value (YAML): choose a domain name that is only a word")
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
    for path in sorted(path for part in (FOLDER, *SPLITS) for path in (folder / part).glob("*")):
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
    tokenizer = stored_tokenizer(job.tokenizer, work / FOLDER)
    kept: dict[Split, list[tuple[int, np.ndarray, int]]] = {split: [] for split in SPLITS}
    begin = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], tokenizer.dtype)
    end = np.array([tokenizer.eos_id], tokenizer.dtype)
    empty = short = long = 0
    for batch in _batches(documents(piece, job.text_field)):
        filled = [(line, text) for line, text in batch if text]
        empty += len(batch) - len(filled)
        for (line, text), ids in zip(filled, _encode(tokenizer, filled, piece), strict=True):
            n_tokens = len(begin) + len(ids) + len(end)
            short += (too_short := n_tokens < (job.min_tokens or 0))
            long += (too_long := n_tokens > (job.max_tokens or math.inf))
            if too_short or too_long:
                continue
            encoded = text.encode()
            kept[_split_of(encoded, job.holdout)].append((line, ids, len(encoded)))
    arrays: dict[str, Any] = {"left_out": np.array([empty, short, long]), "source": np.int64(piece.file)}
    for split, found in kept.items():
        parts = [part for _, ids, _ in found for part in (begin, ids, end)]
        arrays[f"{split}_tokens"] = np.concatenate([end[:0], *parts])  # the only copy of a document
        rows = [(line, len(begin) + len(ids) + len(end)) for line, ids, _ in found]
        arrays[f"{split}_rows"] = np.array(rows, np.int64).reshape(-1, 2)
        arrays[f"{split}_text_bytes"] = np.int64(sum(n_bytes for *_, n_bytes in found))
    write_arrays(path, arrays)
    return piece.consumed


def _encode(tokenizer: Tokenizer, numbered: list[tuple[int, str]], piece: Piece) -> list[np.ndarray]:
    """The tokens of texts; the error names the line of a text that the tokenizer cannot take."""
    try:
        return tokenizer.encode_batch([text for _, text in numbered])
    except (UserError, MemoryError):
        raise
    except Exception as error:  # each library has errors of its own, such as for a million spaces in a row
        line, text = numbered[0]
        if len(numbered) == 1:
            why = f"the tokenizer cannot encode this text of {len(text):,} characters ({one_line(error)[:200]})"
            raise UserError(f"{piece.path}:{line}: {why}: leave it out") from error
        return [ids for each in numbered for ids in _encode(tokenizer, [each], piece)]


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
    tokenizer = stored_tokenizer(job.tokenizer, work / FOLDER)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    write_tokenizer(tokenizer, folder / FOLDER)
    writers: dict[Split, SplitWriter] = {split: SplitWriter(folder / split, tokenizer) for split in SPLITS}
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
