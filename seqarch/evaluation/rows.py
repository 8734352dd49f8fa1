"""The files that tasks read their rows from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from seqarch.data.files import SUFFIXES
from seqarch.data.select import Select
from seqarch.data.sources import cut, json_objects
from seqarch.data.verified import sha256_of
from seqarch.errors import UserError, refused
from seqarch.tables import check_columns


@dataclass(frozen=True)
class RowFiles:
    """The files with the rows of a task by name, their origin in words, and SHA-256 of the files they were made of."""

    where: str
    files: Mapping[str, Path]
    sources: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def sha256(self) -> dict[str, str]:
        """SHA-256 of each file and source, by its name."""
        return {**self.sources, **{name: sha256_of(path) for name, path in self.files.items()}}


def find_file(folder: str | Path | None, name: str) -> Path | None:
    """The JSONL or Parquet file of that name in a folder, `None` if there is none."""
    paths = [Path(folder, name + suffix) for suffix in SUFFIXES] if folder else []
    return next((path for path in paths if path.is_file()), None)


def read_rows(path: Path, *texts: str) -> list[dict[str, Any]]:
    """The rows of a JSONL, Parquet or Arrow file, whose fields `texts` hold text.

    Raises:
        UserError: there are none, a line is not a JSON object or not Unicode text, or a row lacks a text; the message
            names file and line.
    """
    if not (rows := _read(path)):
        raise UserError(f"{path} has no rows")
    for number, row in enumerate(rows, 1):
        if missing := [name for name in texts if not (isinstance(row.get(name), str) and row[name].strip())]:
            raise UserError(f"{path}: row {number} has no {', '.join(missing)}: a row has {', '.join(texts)}")
    return rows


def _read(path: Path) -> list[dict[str, Any]]:
    import pyarrow.ipc
    import pyarrow.parquet

    wrong = f"{path}: is not a whole {path.suffix.removeprefix('.')} file"
    with refused(wrong, pyarrow.ArrowException, OSError):
        if path.suffix == ".arrow":
            with path.open("rb") as file:
                return pyarrow.ipc.open_stream(file).read_all().to_pylist()
        if path.suffix == ".parquet":
            names = pyarrow.parquet.read_schema(path).names
            check_columns(path, names, names)
            return pyarrow.parquet.read_table(path).to_pylist()
    return [row for piece in cut([path], Select("")) for _, row in json_objects(piece)]


def hub_command(name: str, data_set: str, config: str | None, split: str) -> str:
    """The shell command that writes a data set of the Hugging Face hub to `ROWS/NAME.jsonl`."""
    arguments = ", ".join(f"'{each}'" for each in (data_set, config) if each)
    return (
        f'python -c "import datasets; datasets.load_dataset({arguments}, '
        f"split='{split}').to_json('ROWS/{name}.jsonl')\""
    )
