"""Puts tokenised pieces together into the shards of domains, and writes shards and the index of documents."""

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.data.manifest import SPLITS, Manifest, Split, SplitSummary, check_domain, differing_inputs
from seqarch.data.remote import origin, upload
from seqarch.data.shards import (
    BLOCKS,
    DOCUMENT,
    DOCUMENTS,
    DTYPES,
    INDEX,
    MANIFEST,
    PARTS,
    PLAIN_TOKENS,
    WORK,
    Domain,
    Shards,
    block_checksums,
    is_domain,
)
from seqarch.data.tokenizer_files import FOLDER, write_tokenizer
from seqarch.data.tokenizers import Tokenizer
from seqarch.data.verified import remember, sha256_of
from seqarch.errors import UserError, refused
from seqarch.runs.files import check_folder, read_arrays, write_text

MOST_DOMAINS = 200
"""Domains that are written at once: each has files of its own open."""


def check_new(folder: Path) -> None:
    """Refuse a folder that holds something other than a domain or the work on one."""
    ours = is_domain(folder) or origin(folder) or any((folder / name).is_dir() for name in (WORK, PARTS))
    if not ours and folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not a prepared domain: choose another domain or output folder")


def check_inputs(folder: Path, job: Manifest) -> None:
    """Refuse a domain that was prepared from other inputs than those of `job`."""
    if is_domain(folder) and (differing := differing_inputs(Domain(folder).manifest, job)):
        other = f"{origin(folder) or folder} was prepared from other inputs ({', '.join(differing)})"
        raise UserError(f"{other}: choose another domain name or --out, or remove it")


def assemble(job: Manifest, pieces: Sequence[Path], place: Path, tokenizer: Tokenizer) -> list[Manifest]:
    """The shards of one domain, in `place`, or of all that the pieces name, in folders of their names there."""
    names = _domains(job, pieces)
    folders = {name: place if job.domain else place / name for name in names}
    for folder in folders.values():
        check_inputs(folder, job)
        if not job.domain:
            check_new(folder)
            (folder / WORK).mkdir(parents=True, exist_ok=True)  # by which `check_new` knows it after an interruption
            check_folder(folder, place)
    writers = {
        name: {split: SplitWriter(folder / split, tokenizer) for split in SPLITS} for name, folder in folders.items()
    }
    left_out = {name: np.zeros(3, np.int64) for name in names}
    for path in pieces:
        for name, left, parts in _contents(path, tokenizer):
            left_out[job.domain or name] += left
            for split in SPLITS:
                writers[job.domain or name][split].add(*parts[split])
    made = []
    for name in names:
        splits: dict[Split, SplitSummary] = {split: writers[name][split].close() for split in SPLITS}
        manifest = _with_counts(dataclasses.replace(job, domain=name, splits=splits), left_out[name])
        _check_splits(manifest)
        made.append(manifest)
    for manifest in made:
        folder = folders[manifest.domain]
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        write_tokenizer(tokenizer, folder / FOLDER)
        publish(folder, manifest)
        if not job.domain:
            (folder / WORK).rmdir()
    return made


def _domains(job: Manifest, pieces: Sequence[Path]) -> list[str]:
    """The name of the domain, or of all domains in the pieces, sorted."""
    every = (str(name) for path in pieces for name in read_arrays(path, only=("domains",))["domains"].flat)
    if (first := next(every, None)) is None:
        raise UserError(f"no document in {job.asked}: give other files or conditions")
    if job.domain:  # without reading the other pieces
        return [job.domain]
    names = sorted({first, *every})
    if (found := len(names)) > MOST_DOMAINS:
        raise UserError(f"{job.domain_field} has {found:,} values, more than {MOST_DOMAINS} domains: name another")
    for name in names:
        check_domain(name)
    return names


def _contents(
    path: Path, tokenizer: Tokenizer
) -> list[tuple[str, np.ndarray, dict[Split, tuple[np.ndarray, np.ndarray, int]]]]:
    """For each domain in a piece its name, the counts of what was left out `[3]`, and what to add to each split.

    Raises:
        UserError: it is damaged.
    """
    piece = read_arrays(path)

    def numbers(name: str, *shape: int, below: int = 2**62) -> np.ndarray:
        array = piece[name].reshape(shape)
        if array.dtype.kind not in "ui" or (array.size and not 0 <= array.min() <= array.max() < below):
            raise ValueError(name)
        return array

    def added(key: str) -> tuple[np.ndarray, np.ndarray, int]:
        tokens = numbers(f"{key}_tokens", -1, below=tokenizer.vocab_size)
        return tokens, numbers(f"{key}_rows", -1, 3), int(numbers(f"{key}_text_bytes"))

    with refused(f"{path} is damaged: remove it", KeyError, ValueError):
        return [
            (str(name), numbers(f"{key}_left_out", 3), {split: added(f"{key}_{split}") for split in SPLITS})
            for key, name in enumerate(piece["domains"].tolist())
        ]


def _with_counts(manifest: Manifest, left_out: np.ndarray) -> Manifest:
    empty, short, long = left_out.tolist()
    counts = {"empty_documents": empty, "short_documents": short, "long_documents": long}
    return dataclasses.replace(manifest, **{name: getattr(manifest, name) + count for name, count in counts.items()})


def _check_splits(manifest: Manifest) -> None:
    shares = {"train": 1 - manifest.holdout, "holdout": manifest.holdout}
    if empty := [split for split in SPLITS if shares[split] > 0 and not manifest.splits[split].documents]:
        more = f"give more (a text file is one, as a line of JSONL is), or another --holdout than {manifest.holdout:g}"
        raise UserError(f"no document in {empty[0]} of {manifest.domain} ({manifest.counts}): {more}")


def publish(folder: Path, manifest: Manifest, parts: Sequence[str] = (FOLDER, *SPLITS)) -> None:
    """Write the manifest, and all files to object storage if the folder is a mirror, which keeps the hold-out only."""
    for path in sorted(path for part in parts for path in (folder / part).glob("*")):
        upload(path)
        if origin(folder) and path.parent.name == "train":
            path.unlink()
    write_text(folder / MANIFEST, manifest.to_json())
    upload(folder / MANIFEST)


def add_documents(before: Domain, job: Manifest, pieces: Sequence[Path], work: Path) -> Manifest:
    """Write the training split of a domain anew with the documents of the pieces after its own.

    The domain is whole until all is written, and `finish_adding` repairs what an interruption leaves.
    """
    old, folder = before.manifest, before.folder
    writer = SplitWriter(work / "train", before.tokenizer)
    rows = before.rows("train")
    writer.add(np.empty(0, before.tokenizer.dtype), rows, old.splits["train"].text_bytes)
    shards = Shards(folder / "train", old.splits["train"])
    for shard, n_tokens in enumerate(shards.tokens):
        writer.add(shards.read(shard, 0, n_tokens), rows[:0], 0)
    left_out = np.zeros(3, np.int64)
    for path in pieces:
        for _, left, parts in _contents(path, before.tokenizer):
            left_out += left
            writer.add(*parts["train"])
    splits: dict[Split, SplitSummary] = {**old.splits, "train": writer.close()}
    if splits["train"].documents == old.splits["train"].documents:
        raise UserError(f"no document in {job.asked} can be added")
    manifest = _with_counts(dataclasses.replace(old, sources=(*old.sources, *job.sources), splits=splits), left_out)
    write_text(work / MANIFEST, manifest.to_json())
    finish_adding(folder, work)
    return manifest


def finish_adding(folder: Path, work: Path) -> None:
    """Put a new training split in place, if `add_documents` has written it whole."""
    if not (work / MANIFEST).is_file():
        return
    if (work / "train").is_dir():
        shutil.rmtree(folder / "train", ignore_errors=True)
        os.rename(work / "train", folder / "train")
    publish(folder, Manifest.read(work / MANIFEST), ["train"])  # a mirror may keep the hold-out of an earlier domain
    (work / MANIFEST).unlink()


CHUNK_TOKENS = 1 << 25
"""Tokens in a shard file (64 or 128 MiB), all but the last of a split."""

_INDEX_CONFIG: dict[str, Any] = {
    **dict.fromkeys(("chunk_size", "compression", "compression_batch_size", "compression_level", "encryption")),
    "ipc_compression": None,
    "data_spec": PLAIN_TOKENS,
    "item_loader": "TokensLoader",
    "types": "tensor",
}
"""What litdata 0.2.76 writes into the index of such shards, without `chunk_bytes` and `data_format`."""

COUNTED = 1 << 20
"""Tokens that are counted at once: numpy takes four times their memory."""


class SplitWriter:
    """Writes the shards and the document index of one split."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._index, self._blocks = (folder / DOCUMENTS).open("wb"), (folder / BLOCKS).open("wb")
        self._pending: list[np.ndarray] = []
        self._n_pending = 0
        self._chunks: list[dict[str, Any]] = []
        self._counts, self._dtype = np.zeros(tokenizer.vocab_size, np.int64), tokenizer.dtype
        self._digest = hashlib.sha256()
        self._documents = self._tokens = self._text_bytes = 0

    def add(self, tokens: np.ndarray, rows: np.ndarray, text_bytes: int) -> None:
        """Append documents: their tokens, and for each `[n, 3]` its file, line and number of tokens.

        The tokens of documents may also follow in later calls without rows.
        """
        entries = np.empty(len(rows), DOCUMENT)
        entries["offset"] = self._tokens + np.cumsum(rows[:, 2]) - rows[:, 2]
        entries["file"], entries["line"] = rows[:, 0], rows[:, 1]
        self._index.write(entries.tobytes())
        for start in range(0, len(tokens), COUNTED):
            self._counts += np.bincount(tokens[start : start + COUNTED], minlength=len(self._counts))
        self._digest.update(tokens.astype(self._dtype, copy=False).data)
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
        tokens = pending[:n_tokens].astype(self._dtype)
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
            size = self._dtype.itemsize * CHUNK_TOKENS + 64
            data_format = [name for name, dtype in DTYPES.items() if dtype == self._dtype]
            config = {**_INDEX_CONFIG, "chunk_bytes": size, "data_format": data_format}
            index = json.dumps({"chunks": self._chunks, "config": config}, sort_keys=True)
            (self._folder / INDEX).write_text(index)
        files = {path.name: sha256_of(path) for path in sorted(self._folder.iterdir())}
        for name, checksum in files.items():
            remember([self._folder / name], checksum)
        used = self._counts[self._counts > 0] / max(1, self._tokens)
        entropy = math.fsum(-used * np.log(used))
        return SplitSummary(self._documents, self._tokens, self._text_bytes, entropy, self._digest.hexdigest(), files)
