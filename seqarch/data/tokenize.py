"""The pieces of text files, tokenised in parallel and kept in a work folder."""

import collections
import concurrent.futures
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.data.files import source_bytes
from seqarch.data.manifest import SPLITS, Manifest, Split
from seqarch.data.select import Select
from seqarch.data.sources import PIECE_BYTES, Document, Piece, cut, documents
from seqarch.data.tokenizer_files import FOLDER, stored_tokenizer
from seqarch.data.tokenizers import Tokenizer
from seqarch.data.workers import worker_pool
from seqarch.errors import UserError, one_line
from seqarch.runs.files import write_arrays

_BATCH_CHARACTERS = 1 << 20
"""Text handed to the tokenizer at once."""


def tokenize(job: Manifest, files: Sequence[Path], first: int, work: Path, workers: int) -> None:
    """Leave `work/piece-*.npz` for each piece of the files; the index of the first file is `first`."""
    total = sum(source.bytes for source in job.sources)
    select = Select(job.text_field, job.domain_field, job.where)
    pieces = cut(files, select, first)
    run = functools.partial(tokenize_piece, job=job, select=select, work=work)
    here = workers == 1 or total < PIECE_BYTES // 8
    with _progress() as progress:
        task = progress.add_task(job.domain or str(job.domain_field), total=total)
        for consumed in map(run, pieces) if here else _run_in_order(run, pieces, workers):
            progress.update(task, completed=consumed)
        progress.update(task, completed=total)
    for path, source in zip(files, job.sources, strict=True):
        if source_bytes(path) != source.bytes:
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


class _Kept:
    """The documents of a domain in a piece: for each split its rows (file, line, tokens), tokens and bytes of text."""

    def __init__(self) -> None:
        self.left_out = np.zeros(3, np.int64)
        self.rows: dict[Split, list[tuple[int, int, int]]] = {split: [] for split in SPLITS}
        self.tokens: dict[Split, list[np.ndarray]] = {split: [] for split in SPLITS}
        self.text_bytes: dict[Split, int] = dict.fromkeys(SPLITS, 0)

    def arrays(self, dtype: np.dtype) -> dict[str, Any]:
        found: dict[str, Any] = {"left_out": self.left_out}
        for split in SPLITS:
            found[f"{split}_rows"] = np.array(self.rows[split], np.int64).reshape(-1, 3)
            found[f"{split}_text_bytes"] = np.int64(self.text_bytes[split])
            parts = self.tokens.pop(split)  # so that the next line has the only copy of a document
            found[f"{split}_tokens"] = np.concatenate([np.empty(0, dtype), *parts])
        return found


def tokenize_piece(piece: Piece, *, job: Manifest, select: Select, work: Path) -> int:
    """Tokens and documents of one piece, written atomically, unless they are there already; the bytes read so far."""
    path = work / f"piece-{piece.index:06d}.npz"
    if path.exists():
        return piece.consumed
    tokenizer = stored_tokenizer(job.tokenizer, work / FOLDER)
    domains: dict[str, _Kept] = {}
    for batch in _batches(documents(piece, select)):
        _keep(batch, tokenizer, job, domains)
        del batch  # the texts: a long one would be in memory while its tokens are written
    arrays: dict[str, Any] = {"domains": np.array(list(domains), np.str_)}
    for number, kept in enumerate(domains.values()):
        arrays |= {f"{number}_{name}": array for name, array in kept.arrays(tokenizer.dtype).items()}
    write_arrays(path, arrays)
    return piece.consumed


def _keep(batch: list[Document], tokenizer: Tokenizer, job: Manifest, domains: dict[str, _Kept]) -> None:
    """Add the documents of a batch to those of their domains, or to those that are left out."""
    begin = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], tokenizer.dtype)
    end = np.array([tokenizer.eos_id], tokenizer.dtype)
    for document in batch:
        domains.setdefault(document.domain, _Kept()).left_out[0] += not document.text
    filled = [document for document in batch if document.text]
    for document, ids in zip(filled, _encode(tokenizer, filled), strict=True):
        kept, n_tokens = domains[document.domain], len(begin) + len(ids) + len(end)
        too_short, too_long = n_tokens < (job.min_tokens or 0), n_tokens > (job.max_tokens or math.inf)
        kept.left_out[1:] += too_short, too_long
        if too_short or too_long:
            continue
        encoded = document.text.encode()
        split = split_of(encoded, job.holdout)
        kept.rows[split].append((document.file, document.line, n_tokens))
        kept.tokens[split] += begin, ids, end
        kept.text_bytes[split] += len(encoded)


def _encode(tokenizer: Tokenizer, found: list[Document]) -> list[np.ndarray]:
    """The tokens of texts; the error names the line of a text that the tokenizer cannot take."""
    try:
        return tokenizer.encode_batch([document.text for document in found])
    except (UserError, MemoryError):
        raise
    except Exception as error:  # each library has errors of its own, such as for a million spaces in a row
        if len(found) > 1:
            return [ids for each in found for ids in _encode(tokenizer, [each])]
        why = f"the tokenizer cannot encode this text of {len(found[0].text):,} characters ({one_line(error)[:200]})"
        raise UserError(f"{found[0].path}:{found[0].line}: {why}: leave it out") from error


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    batch, characters = [], 0
    for document in found:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def split_of(text: bytes, holdout: float) -> Split:
    """The side of a document: its hash, read as a number in [0, 1), is below the hold-out's share or not."""
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2.0**64
    return "holdout" if number < holdout else "train"
