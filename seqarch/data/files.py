"""The files that text is read from: on a disk, in a folder, from standard input, or of the Hugging Face Hub."""

import contextlib
import glob
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from seqarch.data.verified import sha256_of
from seqarch.errors import UserError, check_known, refused
from seqarch.runs.files import check_file, read_json

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""The kinds of files that hold rows of tasks."""
READ = (*SUFFIXES, ".csv", ".arrow", ".txt", ".md")
"""The kinds of files that text is read from."""
_HUB = "pip install 'seqarch[datasets]'"


def find_files(names: Sequence[str | Path], subset: str | None = None, split: str | None = None) -> list[Path]:
    """The files that are meant: folders and data sets of the Hub give theirs, in order of their names.

    Raises:
        UserError: names the first that is not there, is named twice, is empty, or of a kind that cannot be read.
    """
    if not names:
        raise UserError("no files to prepare: name at least one")
    files: list[Path] = []
    for each in map(str, names):
        if each.startswith("hf://"):
            files += _of_hub(each, subset, split or "train")
        elif Path(each).is_dir():
            files += _of_folder(Path(each))
        else:
            files.append(Path(each))
    seen: set[Path] = set()
    for path in files:
        if (whole := path if is_hub(path) else path.resolve()) in seen:
            raise UserError(f"{path} is named twice: name each file once")
        seen.add(whole)
        if not path.name.endswith(READ):
            raise UserError(f"{path}: cannot read this kind of file; its name must end with {', '.join(READ)}")
        if not is_hub(path):
            check_file(path)
            if path.stat().st_size == 0:
                raise UserError(f"{path}: the file is empty")
    return files


def _of_folder(folder: Path) -> list[Path]:
    """The files of a folder; of a data set as `save_to_disk` of the package datasets writes it, its tables in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json(folder / "dataset_dict.json").get("splits")
        names = ", ".join(map(str, splits)) if isinstance(splits, list) else "one"
        raise UserError(f"{folder} holds a data set of several splits ({names}): name the folder of one of them")
    if (folder / "state.json").is_file():
        tables = read_json(folder / "state.json").get("_data_files")
        names = [each.get("filename") for each in tables or () if isinstance(each, dict)]
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise UserError(f"{folder}/state.json lists no tables of this folder: save the data set again")
        return [folder / str(name) for name in names]
    inside = (folder / name for name in glob.iglob("**", root_dir=folder, recursive=True, include_hidden=True))
    files = sorted(path for path in inside if path.name.endswith(READ) and not path.is_dir() and path.stat().st_size)
    if not files:
        raise UserError(f"{folder} holds no text: its files must end with {', '.join(READ)}")
    return files


@contextlib.contextmanager
def standard_input(folder: Path) -> Iterator[Path]:
    """A file in `folder` with what comes in: JSONL, plain or as gz or zst; it is removed at the end."""
    import tempfile

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".stdin-", dir=folder) as scratch:
        start = sys.stdin.buffer.read(4)
        kind = ".zst" if start == b"\x28\xb5\x2f\xfd" else ".gz" if start[:2] == b"\x1f\x8b" else ""
        path = Path(scratch, f"stdin.jsonl{kind}")
        with path.open("wb") as file:
            file.write(start)
            while block := sys.stdin.buffer.read(1 << 20):
                file.write(block)
        yield path


def is_hub(path: Path) -> bool:
    """Whether a file is on the Hub. `Path` makes one slash of two."""
    return path.parts[:1] == ("hf:",)


def _hub() -> Any:
    """The file system of the Hub."""
    with refused(f"data sets of the Hugging Face Hub need a package: {_HUB}", ImportError):
        from huggingface_hub import HfFileSystem
    return HfFileSystem()


def _of_hub(url: str, subset: str | None, split: str) -> list[Path]:
    """The files of `hf://datasets/OWNER/NAME`, as its card lists them for a subset and a split; or those of a path."""
    parts = url.removeprefix("hf://").split("/")
    if parts[0] != "datasets" or len(parts) < 3 or not all(parts):
        raise UserError(f"{url} does not name a data set of the Hub: give hf://datasets/OWNER/NAME, or files in it")
    # these packages and their client raise many kinds
    package = refused(f"data sets of the Hugging Face Hub need a package: {_HUB}", ImportError)
    with refused(f"{url} cannot be listed", Exception, why=True), package:
        if len(parts) == 3:
            from datasets import load_dataset_builder

            found = load_dataset_builder("/".join(parts[1:]), subset).config.data_files or {}
            check_known(f"split of {url}", split, map(str, found))
            names = [str(name) for name in found[split]]
        else:
            names = [f"hf://{name}" for name in sorted(_hub().glob(url))]
    if not names:
        raise UserError(f"{url} has no such files: name others")
    return [Path(name) for name in names]


def _url(path: Path) -> str:
    return "hf://" + "/".join(path.parts[1:])


def open_source(path: Path) -> Any:
    """A file of pyarrow, to read from."""
    import pyarrow as pa

    return pa.PythonFile(_hub().open(_url(path), "rb"), "r") if is_hub(path) else pa.OSFile(str(path))


def source_bytes(path: Path) -> int:
    """The size of a file."""
    return int(_hub().info(_url(path))["size"]) if is_hub(path) else path.stat().st_size


def source_sha256(path: Path) -> str:
    """The checksum of a file. The Hub knows it for large files; else it is that of the name, which has the revision."""
    if not is_hub(path):
        return sha256_of(path)
    known = (_hub().info(_url(path)).get("lfs") or {}).get("sha256")
    return str(known or hashlib.sha256(_url(path).encode()).hexdigest())
