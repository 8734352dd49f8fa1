"""Prepared domains on disk: manifests, packed sequences, and the documents that they came from.

ROOT/<domain>/manifest.json
ROOT/<domain>/{train,holdout}/index.json, chunk-*.bin      litdata shards of tokens, 16 or 32 bits
ROOT/<domain>/{train,holdout}/documents.bin                where each document starts, and where it came from
ROOT/<domain>/tokenizer/                                   the tokenizer's files (`seqarch.data.tokenizer_files`)
ROOT/<domain>/{train,holdout}/blocks.bin                   a CRC-32 of each block of tokens, compared at each read
"""

import bisect
import functools
import hashlib
import itertools
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from seqarch.data.manifest import NAME, Manifest, Split, SplitSummary, check_name
from seqarch.data.remote import fetch, folders, origin
from seqarch.data.tokenizer_files import FOLDER, stored_tokenizer
from seqarch.data.tokenizers import Tokenizer
from seqarch.data.verified import damaged, is_known, missing, remember, verify
from seqarch.errors import UserError, absent, refused, unknown
from seqarch.runs.files import Checked, check_folder, read_json
from seqarch.tables import ranges_of

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST, INDEX, DOCUMENTS, BLOCKS = "manifest.json", "index.json", "documents.bin", "blocks.bin"
WORK, PARTS = ".work", ".parts"
"""The folder in a domain of what is being prepared."""
BLOCK = 2048
"""Tokens in a block, which is 4 or 8 KiB; the last one of a shard may have fewer."""
PLAIN_TOKENS = '[1, {"type": null, "context": null, "children_spec": []}]'
"""The data format in litdata's index for shards with one tensor per sample."""
DTYPES = {"no_header_tensor:20": np.dtype("<u2"), "no_header_tensor:15": np.dtype("<i4")}
"""The types of tokens by litdata's name for them."""
DOCUMENT = np.dtype([("offset", "<i8"), ("line", "<i4"), ("file", "<i4")])
"""A row of documents.bin: first token in the split, line or row from 1 in the source file, index of the source file."""


def is_domain(folder: Path) -> bool:
    """Whether `folder` holds a prepared domain."""
    try:
        return fetch(folder / MANIFEST).is_file()
    except FileNotFoundError:
        return False


def list_domains(root: Path) -> list[str]:
    """Names of the domains prepared under `root`, sorted."""
    if origin(root):
        names = [name for name in folders(root) if NAME.fullmatch(name)]  # object storage may hold one that is ".."
    else:
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
    return sorted(name for name in names if is_domain(root / name))


def known_domains(root: Path) -> list[str]:
    """`list_domains`, at least one.

    Raises:
        UserError: there is none, or no such folder.
    """
    if not (found := list_domains(root)):
        advice = "prepare one with `seqarch data prepare FILE --out FOLDER --domain NAME`"
        raise absent("prepared domain in" if root.is_dir() else "folder", origin(root) or root, advice)
    return found


def open_domain(root: Path, name: str) -> "Domain":
    """The domain `name` under `root`.

    Raises:
        UserError: the folder or the domain does not exist, or its manifest cannot be read.
    """
    check_name(name)  # which would otherwise lead out of `root`
    if not is_domain(root / name):
        raise unknown(f"domain in {origin(root) or root}", name, known_domains(root))
    return Domain(root / name)


class Domain:
    """A prepared domain."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        check_folder(folder, written=False)
        if (folder / WORK / MANIFEST).is_file():
            raise UserError(f"documents were being added to {folder}: repeat `data prepare --append`, which ends that")
        self.manifest = Manifest.read(folder / MANIFEST)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its tokens."""
        return stored_tokenizer(self.manifest.tokenizer, self.folder / FOLDER)

    def sequences(self, split: Split, length: int) -> "PackedSequences":
        """The split cut into sequences of `length` tokens."""
        return PackedSequences(self, split, length)

    def check(self, split: Split) -> tuple[int, int]:
        """Read all files of a split and compare them with their checksums. Return their number and their bytes.

        Raises:
            UserError: names a file that is missing or damaged.
        """
        summary, n_bytes = self.manifest.splits[split], 0
        shards = Shards(self.folder / split, summary)
        self._documents(split)
        if not summary.files:
            shards.verify_tokens(again=True)
        names = list(summary.files) or [path.name for path in shards.folder.iterdir()]
        for name in names:
            path = checked(shards.folder / name, summary, again=True)
            n_bytes += path.stat().st_size
            if origin(shards.folder) and path in shards.paths:
                path.unlink()
        return len(names), n_bytes

    def describe(self, split: Split, start: int, stop: int) -> str:
        """The documents that tokens `start` to `stop` (excluded) came from: "news.jsonl lines 120-124"."""
        documents = self._documents(split)
        offsets = documents["offset"]
        first = self.document(split, start)
        last = bisect.bisect_left(offsets, stop)
        places = [(int(document["file"]), int(document["line"])) for document in documents[first:last]]
        parts = []
        for file, group in itertools.groupby(places, key=lambda place: place[0]):
            lines = [line for _, line in group]
            ranges = ", ".join(ranges_of(lines))
            parts.append(f"{self.manifest.sources[file].file} line{'s' if len(lines) > 1 else ''} {ranges}")
        return ", ".join(parts)

    def document(self, split: Split, token: int) -> int:
        """Index, in the split, of the document that a token belongs to."""
        return bisect.bisect_right(self._documents(split)["offset"], token) - 1

    def documents(self, split: Split, length: int) -> Iterator[np.ndarray]:
        """The first `length` tokens of each document with at least `length`; the token that ends it counts."""
        shards = Shards(self.folder / split, self.manifest.splits[split])
        files = list(itertools.pairwise([0, *itertools.accumulate(shards.tokens)]))
        ends = [*self._documents(split)["offset"].tolist(), self.manifest.splits[split].tokens]
        for start in (start for start, end in itertools.pairwise(ends) if end - start >= length):
            stop = start + length
            parts = [(i, max(start, a), min(stop, b), a) for i, (a, b) in enumerate(files) if a < stop and start < b]
            yield np.concatenate([shards.read(i, begin - a, end - begin) for i, begin, end, a in parts])

    def rows(self, split: Split) -> np.ndarray:
        """For each document its file, line and number of tokens: `[n, 3]` int64."""
        documents = self._documents(split)
        ends = np.r_[documents["offset"], self.manifest.splits[split].tokens]
        return np.stack([documents["file"], documents["line"], np.diff(ends)], axis=1)

    def starts(self, split: Split) -> np.ndarray:
        """The first token of each document, in a split."""
        return self._documents(split)["offset"]

    @functools.cache  # noqa: B019  (domains live as long as the process)
    def _documents(self, split: Split) -> np.ndarray:
        summary = self.manifest.splits[split]
        path = checked(self.folder / split / DOCUMENTS, summary)
        documents = np.fromfile(path, DOCUMENT)
        borders, files = np.r_[0, documents["offset"], summary.tokens], documents["file"]
        inside = (files >= 0) & (files < len(self.manifest.sources))
        if len(documents) != summary.documents or (np.diff(borders) < 0).any() or not inside.all():
            raise damaged(path)
        return documents


@dataclass(frozen=True)
class Chunk(Checked):
    """A shard file as litdata's index describes it."""

    filename: str
    dim: int
    chunk_bytes: int
    chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not NAME.fullmatch(self.filename):
            raise ValueError(f"it names {self.filename}, which lies elsewhere")


class PackedSequences:
    """Random access to the non-overlapping sequences of `length` tokens in a split of a domain.

    A sequence never crosses the border of a shard file, so less than one sequence per file is left out. No file stays
    open: a process needs memory for one sequence, whatever the size of the split. Each read compares the blocks that
    hold the sequence with their checksums.

    Raises:
        UserError: a file is missing, cut short or damaged, or holds a token that the tokenizer lacks.
    """

    def __init__(self, domain: Domain, split: Split, length: int) -> None:
        self.domain, self.length = domain, length
        self.split: Split = split
        self.shards = Shards(domain.folder / split, domain.manifest.splits[split])
        self.vocab_size = domain.tokenizer.vocab_size
        self.counts = tuple(tokens // length for tokens in self.shards.tokens)
        """Sequences in each shard file."""
        self._first_sample = [0, *itertools.accumulate(self.counts)]
        self._first_token = [0, *itertools.accumulate(self.shards.tokens)]

    def __len__(self) -> int:
        return self._first_sample[-1]

    def __getitem__(self, index: int) -> "Tensor":
        """`[length]` int64."""
        import torch

        index = range(len(self))[index]  # an `IndexError` beyond the end
        shard = self._shard(index)
        tokens = self._read(shard, (index - self._first_sample[shard]) * self.length, self.length)
        return torch.from_numpy(tokens.astype(np.int64))

    def _read(self, shard: int, start: int, n_tokens: int) -> np.ndarray:
        """Tokens of one file, from its `start`-th on."""
        tokens = self.shards.read(shard, start, n_tokens)
        if (largest := int(tokens.max())) >= self.vocab_size:
            raise damaged(
                self.shards.paths[shard], f"not of the tokenizer of its manifest, which lacks the token {largest}"
            )
        return tokens

    def __iter__(self) -> "Iterator[Tensor]":
        return (self[index] for index in range(len(self)))

    def _shard(self, index: int) -> int:
        return bisect.bisect_right(self._first_sample, index) - 1

    def token_range(self, index: int) -> tuple[int, int]:
        """First token of a sequence in its split, and the one after its last."""
        shard = self._shard(index)
        start = self._first_token[shard] + (index - self._first_sample[shard]) * self.length
        return start, start + self.length

    def describe(self, index: int) -> str:
        """The documents that a sequence came from, as of `Domain.describe`."""
        return self.domain.describe(self.split, *self.token_range(index))


class Shards:
    """The shard files of one split: `paths`, their `sizes` in bytes, and the number of `tokens` in each.

    Raises:
        UserError: litdata's index cannot be read, or a file is missing or cut short.
    """

    def __init__(self, folder: Path, summary: SplitSummary) -> None:
        self.folder = folder
        self.summary = summary
        chunks = self._read_index() if summary.tokens else []
        self.paths = [folder / chunk.filename for chunk in chunks]
        self.tokens = [chunk.dim for chunk in chunks]
        self.sizes = [chunk.chunk_bytes for chunk in chunks]
        self._headers = [4 * (chunk.chunk_size + 2) for chunk in chunks]  # of litdata's files, in bytes
        for path, size in zip(self.paths, self.sizes, strict=True):
            if not origin(folder) and (not path.is_file() or path.stat().st_size < size):
                raise missing(path)
        self._verified: set[int] = set()
        self._first_block = [0, *itertools.accumulate(-(-n_tokens // BLOCK) for n_tokens in self.tokens)]
        self._blocks = checked(folder / BLOCKS, summary) if chunks and BLOCKS in summary.files else None

    def _read_index(self) -> list[Chunk]:
        path = checked(self.folder / INDEX, self.summary)
        wrong = str(damaged(path, "not the index of the tokens in its manifest"))
        with refused(wrong, UserError, ValueError, KeyError, TypeError, why=True):
            content = read_json(path)
            (data_format,), data_spec = (content["config"][key] for key in ("data_format", "data_spec"))
            self.dtype = DTYPES[data_format]
            chunks = [Chunk(*(chunk[field.name] for field in fields(Chunk))) for chunk in content["chunks"]]
            if data_spec != PLAIN_TOKENS:  # litdata imports what this names
                raise ValueError("it describes other data")
            if (n_tokens := sum(chunk.dim for chunk in chunks)) != self.summary.tokens:
                raise ValueError(f"it lists {n_tokens:,} tokens")
        return chunks

    def read(self, shard: int, start: int, n_tokens: int) -> np.ndarray:
        """Tokens of one file, in the type of the shards, from its `start`-th on."""
        self.verify(shard)
        if self._blocks is None:
            return self._tokens(shard, start, start + n_tokens)
        first, stop = start // BLOCK, -(-(start + n_tokens) // BLOCK)
        tokens = self._tokens(shard, first * BLOCK, min(stop * BLOCK, self.tokens[shard]))
        offset = 4 * (self._first_block[shard] + first)
        checksums = self._read(self._blocks, 4 * (stop - first), offset)
        if block_checksums(tokens) != np.frombuffer(checksums, "<u4").tolist():
            raise damaged(self.paths[shard])
        return tokens[start - first * BLOCK :][:n_tokens]

    def _tokens(self, shard: int, start: int, stop: int) -> np.ndarray:
        size = self.dtype.itemsize
        content = self._read(self.paths[shard], size * (stop - start), self._headers[shard] + size * start)
        return np.frombuffer(content, self.dtype)

    def _read(self, path: Path, n_bytes: int, offset: int) -> bytes:
        """Bytes of a file. A memory map would end the process where another one cuts the file."""
        try:
            content = _read_bytes(path, n_bytes, offset)
        except FileNotFoundError:  # in a mirror, another process may have removed it to make room
            content = _read_bytes(checked(path, self.summary, again=True), n_bytes, offset)
        if len(content) < n_bytes:
            raise missing(path)
        return content

    def verify(self, shard: int) -> None:
        """Make a file ready to be read, and compare it as a whole if its blocks have no checksums.

        A manifest of an earlier version may lack the file's checksum too. Then the tokens of all files are compared
        with their common checksum.
        """
        if shard in self._verified:
            return
        if self.paths[shard].name not in self.summary.files:
            self.verify_tokens()
        elif self._blocks is None or origin(self.folder):
            checked(self.paths[shard], self.summary)
        self._verified.add(shard)

    def verify_tokens(self, *, again: bool = False) -> None:
        """Compare the tokens of all files with their checksum."""
        checksum = self.summary.sha256
        if again or not all(is_known(path, checksum) for path in self.paths):
            digest = hashlib.sha256()
            for path, header, n_tokens in zip(self.paths, self._headers, self.tokens, strict=True):
                digest.update(np.fromfile(path, self.dtype, n_tokens, offset=header).data)
            if digest.hexdigest() != checksum:
                raise damaged(self.folder / "chunk-*.bin")
            remember(self.paths, checksum)
        self._verified.update(range(len(self.paths)))


def _read_bytes(path: Path, n_bytes: int, offset: int) -> bytes:
    """Bytes of a file, in a quarter of the time of `numpy.fromfile`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, n_bytes, offset)
    finally:
        os.close(descriptor)


def block_checksums(tokens: np.ndarray) -> list[int]:
    """The CRC-32 of each block of tokens. It finds any change of up to 32 bits in a row."""
    return [zlib.crc32(tokens[start : start + BLOCK].data) for start in range(0, len(tokens), BLOCK)]


def checked(path: Path, summary: SplitSummary, *, again: bool = False) -> Path:
    """A file of a split, downloaded if it lies in object storage and is not here, and compared with its checksum.

    Args:
        path: the file.
        summary: of the split. If it is of an earlier version, without checksums of files, nothing is compared.
        again: read the file even where it is known to match.

    Raises:
        UserError: the file is missing or damaged, or lies in object storage without a checksum in the manifest.
    """
    if origin(path.parent) and path.name not in summary.files:
        raise UserError(f"the manifest of {path.parent.parent.name} has no checksum of {path.name}: prepare it again")
    checksum = summary.files.get(path.name)
    try:
        fetch(path, checksum)
    except FileNotFoundError as url:
        raise missing(str(url)) from None
    if checksum:
        verify(path, checksum, again=again)
    elif not path.is_file():
        raise missing(path)
    return path
