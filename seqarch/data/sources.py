"""Reading documents: JSONL, Parquet, CSV, Arrow and text files, cut into pieces that workers take."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from seqarch.data.files import open_source, source_bytes
from seqarch.data.select import Place, Select
from seqarch.errors import in_utf8, refused
from seqarch.runs.files import parse_object

PIECE_BYTES = 8 << 20
"""Text in a piece, about."""
TEXTS = (".txt", ".md")
"""The kinds of files that are one document each."""
CSV_BYTES = 32 << 20
"""What is read of a CSV file at once; a row must be shorter."""
CUT = 4
"""Raised whenever the same files give other pieces."""

Found = tuple[int, "bytes | list[dict[str, Any]]", int]
"""First line, content, and bytes read so far, of a piece of one file."""


@dataclass(frozen=True)
class Piece:
    """A part of the source files. Which pieces there are depends only on the files, never on the number of workers."""

    index: int
    file: int
    paths: tuple[Path, ...]
    """The file that it is in; or several whole text files, of which `file` is the first."""
    first_line: int
    """The first line (JSONL) or row of the piece, counted from 1."""
    content: bytes | list[dict[str, Any]]
    """Whole lines of JSONL, or rows with the columns that are read; text files are read by the worker."""
    consumed: int
    """Bytes on disk read up to the end of this piece, over all files: for progress."""


class Document(NamedTuple):
    """A text and where it comes from: the index of its file, and its line or row there from 1."""

    file: int
    path: Path
    line: int
    domain: str
    text: str


def cut(files: Sequence[Path], select: Select, first: int = 0) -> Iterator[Piece]:
    """The pieces of files, in order; the index of the first file is `first`."""
    index = consumed = 0
    texts: list[Path] = []  # small files of text, which make one piece
    size = 0
    for file, path in enumerate(files, first):
        n_bytes = source_bytes(path)
        is_text = path.suffix in TEXTS
        if texts and (not is_text or size + n_bytes > PIECE_BYTES):
            yield Piece(index, file - len(texts), tuple(texts), 1, b"", consumed)
            index, texts, size = index + 1, [], 0
        if is_text:
            texts.append(path)
            size += n_bytes
        else:
            cut = {".parquet": _cut_parquet, ".csv": _cut_csv, ".arrow": _cut_arrow}.get(path.suffix, _cut_jsonl)
            for first_line, content, done in cut(path, select):
                yield Piece(index, file, (path,), first_line, content, consumed + done)
                index += 1
        consumed += n_bytes
    if texts:
        yield Piece(index, first + len(files) - len(texts), tuple(texts), 1, b"", consumed)


def _cut_jsonl(path: Path, select: Select) -> Iterator[Found]:
    import pyarrow as pa

    codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    first_line, rest = 1, b""
    with _readable(path), open_source(path) as raw:
        stream = pa.CompressedInputStream(raw, codec) if codec else raw
        while block := stream.read(PIECE_BYTES):
            block = rest + block
            end = block.rfind(b"\n") + 1
            lines, rest = block[:end], block[end:]
            if lines:
                yield first_line, lines, raw.tell()
                first_line += lines.count(b"\n")
        if rest:
            yield first_line, rest, raw.tell()


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Refuse a file that pyarrow cannot read, or whose text is not UTF-8."""
    import pyarrow as pa

    message = f"{path}: cannot be read whole as the kind of file that its name says"
    with refused(message, OSError, pa.ArrowInvalid, why=True), in_utf8(path):
        yield


def _cut_parquet(path: Path, select: Select) -> Iterator[Found]:
    import pyarrow.parquet as pq

    with _readable(path), open_source(path) as raw, pq.ParquetFile(raw) as table:
        columns = select.columns(table.schema_arrow.names, path)
        inside = [
            i for i, each in enumerate(table.schema) if each.path.split(".")[0] in columns or each.path in columns
        ]
        groups = map(table.metadata.row_group, range(table.num_row_groups))
        n_bytes = sum(group.column(column).total_uncompressed_size for group in groups for column in inside)
        rows = max(1, table.metadata.num_rows * PIECE_BYTES // max(1, n_bytes))
        yield from _rows(table.iter_batches(rows, columns=columns), table.metadata.num_rows, path)


def _cut_csv(path: Path, select: Select) -> Iterator[Found]:
    import pyarrow as pa
    from pyarrow import csv

    with _readable(path), open_source(path) as raw:
        read = csv.ReadOptions(block_size=CSV_BYTES)
        parse = csv.ParseOptions(newlines_in_values=True)
        with csv.open_csv(raw, read, parse) as table:
            columns = select.columns(table.schema.names, path)
        raw.seek(0)
        text = csv.ConvertOptions(
            check_utf8=False,  # `_to_rows` says in which row
            include_columns=columns,
            column_types=dict.fromkeys(columns, pa.string()),
            strings_can_be_null=False,
        )
        with csv.open_csv(raw, read, parse, text) as table:
            yield from _rows(table, None, path)


def _cut_arrow(path: Path, select: Select) -> Iterator[Found]:
    import pyarrow as pa

    with _readable(path), open_source(path) as raw:
        magic = raw.read(6)
        raw.seek(0)
        opened: Any = pa.ipc.open_file(raw) if magic == b"ARROW1" else pa.ipc.open_stream(raw)
        columns = select.columns(opened.schema.names, path)
        batches = (opened.get_batch(i) for i in range(opened.num_record_batches)) if magic == b"ARROW1" else opened
        yield from _rows((batch.select(columns) for batch in batches), None, path)


def _rows(batches: Any, n_rows: int | None, path: Path) -> Iterator[Found]:
    """The rows of a table's batches, about `PIECE_BYTES` at a time."""
    done, n_bytes = 0, source_bytes(path)
    for batch in batches:
        step = batch.num_rows if n_rows else max(1, batch.num_rows * PIECE_BYTES // max(1, batch.nbytes))
        parts = [batch.slice(start, step) for start in range(0, batch.num_rows, max(1, step))]
        del batch  # else the texts would be in memory once more
        while parts:
            rows = _to_rows(parts.pop(0), path, done + 1)
            first, done = done + 1, done + len(rows)  # before the rows are read, which empties the list
            yield first, rows, n_bytes * done // n_rows if n_rows else 0


def _to_rows(batch: Any, path: Path, first: int) -> list[dict[str, Any]]:
    """The rows of a batch, whose first has this number in the file."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:  # one at a time is slow
        rows = []
        for row in range(batch.num_rows):
            with refused(f"{path} is not UTF-8 text: row {first + row}; save it as UTF-8", UnicodeDecodeError):
                rows += batch.slice(row, 1).to_pylist()
        return rows


def documents(piece: Piece, select: Select) -> Iterator[Document]:
    """The documents of a piece that meet the conditions, empty ones included.

    Raises:
        UserError: names the file and the line, what is wrong there and what would be right.
    """
    for file, path, line, record in _records(piece, select):
        if picked := select.pick(record, Place(path, line)):
            yield Document(file, path, line, *picked)


def _records(piece: Piece, select: Select) -> Iterator[tuple[int, Path, int, dict[str, Any]]]:
    first = piece.paths[0]
    if isinstance(piece.content, list):
        content = piece.content[::-1]
        piece.content.clear()
        for line in range(piece.first_line, piece.first_line + len(content)):
            yield piece.file, first, line, content.pop()  # no row stays in memory after its turn
    elif piece.content:
        for line, record in json_objects(piece):
            yield piece.file, first, line, record
    else:
        for file, path in enumerate(piece.paths, piece.file):
            with _readable(path), open_source(path) as raw:
                text = raw.read().decode("utf-8-sig")
            yield file, path, 1, {select.text_field: text}


def json_objects(piece: Piece) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of each line of a piece of JSONL that is not blank."""
    assert isinstance(piece.content, bytes)
    path = piece.paths[0]
    for line, raw in enumerate(piece.content.split(b"\n"), piece.first_line):
        if raw.strip():
            yield line, parse_object(raw, path, line)
