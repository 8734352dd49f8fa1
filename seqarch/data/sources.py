"""Reading documents: JSONL (plain, .gz, .zst) and Parquet, cut into pieces that workers take."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqarch.errors import UserError
from seqarch.runs.files import parse_json

PIECE_BYTES = 8 << 20
"""Text in a piece, about."""
CUT = 2
"""Raised whenever the same files give other pieces."""

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@dataclass(frozen=True)
class Piece:
    """A part of a source file. Which pieces there are depends only on the files, never on the number of workers."""

    index: int
    file: int
    path: Path
    first_line: int
    """The first line (JSONL) or row (Parquet) of the piece, counted from 1."""
    content: bytes | list[str | None]
    """Whole lines of JSONL, or the texts of rows of Parquet."""
    consumed: int
    """Bytes on disk read up to the end of this piece, over all files: for progress."""


def check_files(files: Sequence[Path]) -> None:
    """Refuse, before any work, files that are not there, named twice, empty, or of a kind that cannot be read.

    Raises:
        UserError: names the first such file.
    """
    if not files:
        raise UserError("no files to prepare: name at least one")
    seen: set[Path] = set()
    for path in files:
        if (whole := path.resolve()) in seen:
            raise UserError(f"{path} is named twice: name each file once")
        seen.add(whole)
        if not path.name.endswith(SUFFIXES):
            raise UserError(f"{path}: cannot read this kind of file; its name must end with {', '.join(SUFFIXES)}")
        if not path.is_file():
            raise UserError(f"{path}: there is no such file")
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty")


def cut(files: Sequence[Path], text_field: str) -> Iterator[Piece]:
    """The pieces of all files, in order."""
    index = consumed = 0
    for file, path in enumerate(files):
        pieces = _cut_parquet(path, text_field) if path.suffix == ".parquet" else _cut_jsonl(path)
        for first_line, content, done in pieces:
            yield Piece(index, file, path, first_line, content, consumed + done)
            index += 1
        consumed += path.stat().st_size


def _cut_jsonl(path: Path) -> Iterator[tuple[int, bytes, int]]:
    import pyarrow as pa

    codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    first_line, rest = 1, b""
    with _readable(path), pa.OSFile(str(path)) as raw:
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

    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); is the file whole, and of the kind that its name says?"
        ) from error


def _cut_parquet(path: Path, text_field: str) -> Iterator[tuple[int, list[str | None], int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _readable(path), pq.ParquetFile(path) as table:
        schema = table.schema_arrow
        if text_field not in schema.names:
            raise UserError(f"{path}: no column '{text_field}'; the columns are {', '.join(schema.names)}")
        check_columns(path, schema.names, [text_field])
        kind = schema.field(text_field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise UserError(f"{path}: column '{text_field}' holds {kind}, not text")
        column = next(i for i, each in enumerate(table.schema) if each.path == text_field)
        groups = map(table.metadata.row_group, range(table.num_row_groups))
        n_bytes = sum(group.column(column).total_uncompressed_size for group in groups)
        rows, done, size = table.metadata.num_rows, 0, path.stat().st_size
        for batch in table.iter_batches(max(1, rows * PIECE_BYTES // max(1, n_bytes)), columns=[text_field]):
            texts = batch.column(0).to_pylist()
            del batch  # the texts once more
            yield done + 1, texts, size * (done + len(texts)) // rows
            done += len(texts)


def check_columns(path: Path, names: Sequence[str], read: Sequence[str]) -> None:
    """Refuse a table with several columns of a name that is read."""
    if twin := next((name for name in read if names.count(name) > 1), None):
        raise UserError(f"{path}: {names.count(twin)} columns are called '{twin}': leave one, or rename the others")


def documents(piece: Piece, text_field: str) -> Iterator[tuple[int, str]]:
    """(line or row, text) of each document of a piece, empty ones included.

    Raises:
        UserError: names the file and the line, what is wrong there and what would be right.
    """
    is_json = isinstance(piece.content, bytes)
    for line, text in _json_documents(piece, text_field) if is_json else _parquet_documents(piece, text_field):
        check_unicode(text, piece.path, line)
        yield line, text


def check_unicode(text: str, path: Path, line: int) -> None:
    """Refuse a text that is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{path}:{line}: the text holds half a surrogate pair, which is not Unicode text") from error


def _json_documents(piece: Piece, text_field: str) -> Iterator[tuple[int, str]]:
    for line, record in json_objects(piece, text_field):
        if text_field not in record:
            known = ", ".join(record) or "none"
            raise UserError(f"{piece.path}:{line}: has no field '{text_field}'; its fields are {known}")
        text = record[text_field]
        if not isinstance(text, str):
            raise UserError(f"{piece.path}:{line}: field '{text_field}' holds {_kind(text)}, not text")
        yield line, text


def json_objects(piece: Piece, field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of each line of a piece of JSONL that is not blank; `field` is one that an object should have."""
    assert isinstance(piece.content, bytes)
    for line, raw in enumerate(piece.content.split(b"\n"), piece.first_line):
        if raw.strip():
            record = parse_json(raw, piece.path, line)
            if not isinstance(record, dict):
                found = f"holds {_kind(record)}; expected an object"
                raise UserError(f'{piece.path}:{line}: {found}, {{"{field}": "..."}}')
            yield line, record


def _kind(value: Any) -> str:
    """How JSON calls the type of a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _parquet_documents(piece: Piece, text_field: str) -> Iterator[tuple[int, str]]:
    for line, text in enumerate(piece.content, piece.first_line):
        if not isinstance(text, str):
            raise UserError(f"{piece.path}:{line}: column '{text_field}' is null in this row, not text")
        yield line, text
