"""The format of a checkpoint that is a folder, and the check of such a folder before anything in it is used.

FOLDER/shard_00000.safetensors    tensors, and rows of tensors that are split along their first dimension
FOLDER/index.json                 which files have rows of which tensor, the SHA-256 of each file, and all else that a
                                  checkpoint holds, as plain values

Names and shapes of the rows in a file are in its own header. Nothing is pickled.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from seqarch.data.verified import sha256_of
from seqarch.errors import UserError, one_line, refused
from seqarch.runs.files import check_folder, parse_json
from seqarch.runs.folder import INDEX

FORMAT = 1
"""The number of this format, in case that another one follows."""
WEIGHTS, OPTIMIZERS = "state_dict", "optimizer_states"
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}
"""Names of dtypes in a safetensors file."""
_NAMES = {name: dtype for dtype, name in DTYPES.items()}


_OF_JSON = (TypeError, KeyError, AttributeError, RecursionError)
"""What code raises for JSON of another form."""


class Damage(ValueError):
    """What is wrong with a folder, in words that follow "is damaged: "."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a tensor that one file has: `shape[0]` of them from `start` on. A scalar is one whole row."""

    file: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def offsets(self) -> tuple[int, ...]:
        return (self.start, *(0 for _ in self.shape[1:])) if self.shape else ()


def shard_name(number: int) -> str:
    """The file of the process with a number."""
    return f"shard_{number:05}.safetensors"


def index_text(files: Mapping[str, str], tensors: Mapping[str, Collection[str]], content: Any) -> str:
    """The text of `index.json`.

    Args:
        files: the SHA-256 of each file.
        tensors: the files with rows of each tensor, in the order of the rows.
        content: the checkpoint, as of `split`.
    """
    index = {"format": FORMAT, "files": files, "tensors": tensors, "content": content}
    return json.dumps({"sha256": _digest(index), **index}, indent=1) + "\n"


def _digest(index: Mapping[str, Any]) -> str:
    """SHA-256 of all that an index says, the digests of its files included."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


class Folder:
    """A checkpoint that is a folder, whose index and headers agree. `check_files` compares the tensors' bytes too.

    Args:
        path: the folder.

    Raises:
        Damage: it is not as it was written, or holds what no checkpoint does.
        UserError: `index.json` is not JSON, or the folder holds a FIFO, a socket or a device.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: dict[str, Any] = {}
        check_folder(path, written=False)
        index = _read_index(path)
        self.sha256: str = index["sha256"]
        """SHA-256 of all that the checkpoint holds."""
        self.files: dict[str, str] = index["files"]
        self.tensors: dict[str, list[Rows]] = self._place(index["tensors"])
        """The rows of each tensor, in their order."""
        self._content = index["content"]
        self.content(self.tensors.__getitem__)  # has the form of a checkpoint and names tensors that are there

    def _place(self, named: Any) -> dict[str, list[Rows]]:
        """The rows of all tensors, which the files' headers tell and the index puts in order."""
        headers = {file: header(self.path / file) for file in self.files}
        found = sorted((file, name) for file, tensors in headers.items() for name in tensors)
        wrong = f"its files hold other tensors than {INDEX} names"
        with refused(wrong, IndexError, *_OF_JSON, raises=Damage):
            if found != sorted((file, name) for name, files in named.items() for file in files):
                raise Damage(wrong)
            parts = {name: [headers[file][name] for file in files] for name, files in named.items()}
            return {name: _in_order(name, named[name], each) for name, each in parts.items()}

    def content(self, tensor: Callable[[str], Any], *, weights: bool = True, training: bool = True) -> dict[str, Any]:
        """The checkpoint as one file has it, in which optimizers number the parameters.

        Args:
            tensor: gives a tensor by its place.
            weights: whether to ask for the weights; otherwise there are none.
            training: whether to ask for the states of the optimizers; otherwise there are only their options.
        """
        wrong = f"the content of {INDEX} is not that of a checkpoint"
        with refused(wrong, ValueError, *_OF_JSON, why=True, raises=Damage):
            content = {**self._content}
            if not weights:
                content[WEIGHTS] = {}
            if OPTIMIZERS in content:
                content[OPTIMIZERS] = [_by_number(each, whole=training) for each in content[OPTIMIZERS]]
            return join(content, tensor)

    def check_files(self, part: slice = slice(None)) -> None:
        """Compare files with their SHA-256, all or a part of them.

        Raises:
            Damage: one differs.
        """
        for file in sorted(self.files)[part]:
            if sha256_of(self.path / file) != self.files[file]:
                raise Damage(f"the content of {file} differs from its checksum")

    @property
    def optimizers(self) -> list[dict[str, Any]]:
        """The groups of parameters of each optimizer, by the parameters' names."""
        return [join(each["param_groups"], self.read) for each in self._content.get(OPTIMIZERS, [])]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        last = self.tensors[name][-1]
        return (last.start + last.shape[0], *last.shape[1:]) if last.shape else ()

    def read(self, name: str) -> Tensor:
        """A whole tensor; one that lies in one file stays on disk until it is used."""
        rows = [self.open(each.file).get_tensor(name) for each in self.tensors[name]]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def slice(self, name: str, rows: Rows, slices: tuple[slice, ...]) -> Tensor:
        """A part of the rows that a file has of a tensor; `slices` count from the first of these rows."""
        return self.open(rows.file).get_slice(name)[slices] if slices else self.open(rows.file).get_tensor(name)

    def open(self, file: str) -> Any:
        """A file, opened once."""
        if file not in self._opened:
            self._opened[file] = safe_open(self.path / file, "pt")
        return self._opened[file]


def _by_number(state: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """The state of an optimizer with numbers in place of the parameters' names, as PyTorch numbers them."""
    groups = state["param_groups"]
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    return {
        "state": {numbers[name]: each for name, each in state["state"].items()} if whole else {},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def _read_index(path: Path) -> dict[str, Any]:
    """The index of a folder, once it is whole and names the files of the folder.

    Raises:
        Damage: it is not.
        UserError: it is not JSON, or of another format.
    """
    index = parse_json((path / INDEX).read_bytes(), path / INDEX)
    with refused(f"{INDEX} is not that of a checkpoint", *_OF_JSON, raises=Damage):
        if index["format"] != FORMAT:
            raise UserError(f"{path} is a checkpoint of format {index['format']!r}: this seqarch reads {FORMAT}")
        whole = index["sha256"] == _digest({name: index[name] for name in ("format", "files", "tensors", "content")})
        names = {*index["files"].keys()}
    if not whole:
        raise Damage(f"the content of {INDEX} differs from its checksum")
    there = {each.name for each in path.iterdir()} - {INDEX}  # so a name leads nowhere else
    if odd := min(names ^ there, default=None):
        raise Damage(f"{one_line(odd)[:80]} {'is missing' if odd in names else 'does not belong to a checkpoint'}")
    return index


def header(file: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of all tensors in a file. The library refuses a header that does not fit the file's size."""
    kinds = SafetensorError, OSError, KeyError  # of a dtype
    with (
        refused(f"{file.name} is cut short or no safetensors file", *kinds, raises=Damage),
        safe_open(file, "pt") as opened,
    ):
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: (tuple(each.get_shape()), _NAMES[each.get_dtype()]) for name, each in slices.items()}


def _in_order(name: str, files: Sequence[str], parts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Rows]:
    """The rows of one tensor, one part after the other.

    Raises:
        Damage: the parts are not parts of one tensor.
    """
    (first, dtype), start, rows = parts[0], 0, []
    wanted = (len(first), first[1:], dtype)
    if any((len(shape), shape[1:], kind) != wanted for shape, kind in parts) or (not first and len(parts) > 1):
        raise Damage(f"its files hold parts of {one_line(name)[:80]} that do not fit each other")
    for file, (shape, _) in zip(files, parts, strict=True):
        rows.append(Rows(file, start, shape, dtype))
        start += shape[0] if shape else 0
    return rows


_TENSOR, _TUPLE, _PAIRS = "$tensor", "$tuple", "$pairs"
_SCALAR = (bool, int, float, str, type(None))


def split(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON holds it. Its tensors go to `tensors`, under their `place` in the checkpoint.

    Raises:
        UserError: it holds something else than tensors, plain values, and mappings, lists and tuples of them.
    """
    if isinstance(value, Tensor):
        while place in tensors:  # a key holds a slash
            place += "/"
        tensors[place] = value
        return {_TENSOR: place}
    if isinstance(value, Mapping):
        pairs = [[_key(key, place), split(each, f"{place}/{key}", tensors)] for key, each in value.items()]
        return dict(pairs) if all(isinstance(key, str) and key[:1] != "$" for key in value) else {_PAIRS: pairs}
    if isinstance(value, list | tuple):
        each = [split(each, f"{place}/{number}", tensors) for number, each in enumerate(value)]
        return each if isinstance(value, list) else {_TUPLE: each}
    return _key(value, place)


def _key(value: Any, place: str) -> Any:
    if not isinstance(value, _SCALAR):
        raise UserError(f"checkpoint.sharded saves tensors and plain values, but {place} is a {type(value).__name__}")
    return value


def join(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The value that `split` was given; `tensor` gives a tensor by its place."""
    if isinstance(value, list):
        return [join(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensor(value[_TENSOR])
    if _TUPLE in value:
        return tuple(join(each, tensor) for each in value[_TUPLE])
    pairs = value.get(_PAIRS, value.items())
    return {key: join(each, tensor) for key, each in pairs}
