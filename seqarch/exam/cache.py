"""What decides a run and what an exam keeps: prepared text, checksums of data and code, finished runs.

RUN/exam.json      fingerprint, minutes, and where a run was copied from
CACHE/exam/KEY     for each fingerprint the run folder of the reference that has it
"""

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import seqarch
from seqarch.data.corpus import find_root
from seqarch.data.files import READ
from seqarch.data.prepare import prepare
from seqarch.data.shards import is_domain, list_domains, open_domain
from seqarch.data.verified import cache_folder
from seqarch.errors import UserError, absent, say
from seqarch.runs import files
from seqarch.runs.curves import read_rows
from seqarch.runs.files import check_folder, read_json, write_json
from seqarch.runs.keys import without
from seqarch.runs.layout import CHECKPOINTS, CURVES, EVENTS, RECORD, TENSORBOARD, newest_checkpoint
from seqarch.runs.record import is_finished, read_note, write_note

DECIDES = ("data", "kernels", "mixers", "model", "evaluation", "training", "experiment")
"""Folders and files of seqarch that decide what a run trains and measures."""
CODE = (".py", ".json")
"""Suffixes of code files and of files with recorded kernel settings."""
HOLDOUT = {"train": 0.02, "ood": 0.5}
"""Share of the documents in the hold-out; only the hold-out of an OOD domain is used."""


def find_shards(folder: Path, train: Sequence[str], ood: Sequence[str], tokenizer: str, prepared: Path) -> Path:
    """The folder with all domains prepared: `folder` itself, or `prepared`, made of text files in `folder`.

    A domain's text is in files with its name: `web.jsonl.zst`, or `web-0.parquet` and `web-1.parquet`.

    Args:
        folder: shards or text files.
        train: the training domains.
        ood: the OOD domains.
        tokenizer: what text files are prepared with.
        prepared: where their shards go.

    Raises:
        UserError: there is no such folder, a domain is neither there as shards nor as text, or `prepared` holds shards
            of other text or of another tokenizer.
    """
    if not folder.is_dir():
        raise absent("folder", folder, "--data names one")
    names = [*train, *ood]
    if all(is_domain(folder / name) for name in names):
        return folder
    files = {name: text_files(folder, name, names) for name in names}
    missing = [name for name in names if not files[name]]
    if missing:
        domains = ", ".join(list_domains(folder)) or "none"
        raise UserError(
            f"--data {folder}: there are neither shards nor text files (such as {missing[0]}.jsonl.zst) of "
            f"{', '.join(missing)}; prepared domains there: {domains}; other domains are named with --data.train and "
            "--data.ood"
        )
    check_folder(prepared, prepared.parent)
    for name in names:
        if not is_domain(prepared / name):
            say(f"preparing {name} from {', '.join(path.name for path in files[name])} into {prepared}")
        prepare(files[name], prepared, name, tokenizer, holdout=HOLDOUT["train" if name in train else "ood"])
    return prepared


def text_files(folder: Path, domain: str, domains: Sequence[str]) -> list[Path]:
    """The files of a domain's text, sorted. A file belongs to the longest of the names in `domains` that fit it."""

    def domain_of(path: Path) -> str:
        fitting = (each for each in domains if path.name.startswith((f"{each}.", f"{each}-")))
        return max(fitting, key=len, default="")

    return sorted(each for each in folder.iterdir() if each.name.endswith(READ) and domain_of(each) == domain)


def checksums(root: str, domains: Sequence[str]) -> dict[str, str]:
    """The identity of each domain's tokens: tokenizer and checksums of both splits."""
    manifests = {name: open_domain(find_root(root), name).manifest for name in domains}
    return {
        name: f"{each.tokenizer} {each.splits['train'].sha256} {each.splits['holdout'].sha256}"
        for name, each in manifests.items()
    }


def code_digest(packages: Iterable[str], *more: Path) -> str:
    """Eight digits that change with seqarch's own code, that in `more` folders, and all code of other packages."""
    parts = [*own_parts(), *more]
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        parts += [Path(part) for part in spec.submodule_search_locations or [spec.origin] if part]
    return digest(parts)


def own_parts() -> list[Path]:
    """The folders and files of seqarch that decide a run."""
    return [Path(seqarch.__file__).parent / part for part in DECIDES]


def digest(parts: Iterable[Path]) -> str:
    """Eight digits of the names and the contents of the code in folders and files."""
    total = hashlib.sha256()
    for part in parts:
        inside = [path for path in sorted(part.rglob("*")) if path.suffix in CODE and path.is_file()]
        for path in [part] if part.is_file() else inside:
            name = "" if path == part else path.relative_to(part).as_posix()
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{part.name}/{name} {content}\n".encode())
    return total.hexdigest()[:8]


def fingerprint(recipe: Mapping[str, Any], seed: int, checksums: Mapping[str, str], code: str) -> str:
    """The identity of a run: one digest of recipe, seed and the data's checksums, and one of the code."""
    parts = {"recipe": without(recipe, "exam"), "seed": seed, "data": dict(checksums)}
    return f"{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]}-{code}"


def difference(before: str, now: str) -> str:
    """Why two fingerprints mean different runs."""
    recipe, _, code = before.partition("-")
    if code and recipe != now.partition("-")[0]:
        return "it was made with another recipe or data"
    return "the code of seqarch or of the model has changed since it was made"


def locked(lock: Path, does: str) -> AbstractContextManager[None]:
    """Hold a lock file. If another exam holds it, the refusal says what that exam does."""
    return files.locked(lock, f"another exam {does}: wait for it, or choose another --out")


def has_begun(run: Path) -> bool:
    """Whether a run has taken a step: its curves go beyond the start, or there is a checkpoint."""
    _, rows = read_rows(run / CURVES)
    return any(float(row["step"]) > 0 for row in rows) or newest_checkpoint(run) is not None


def minutes_used(run: Path) -> float:
    """Minutes of all attempts at a run so far; a killed attempt counts up to the last row of its curves.

    During an attempt the note has `start`: its time, minus the duration of earlier attempts.
    """
    note = read_note(run)
    if note.get("start") and (run / CURVES).is_file():
        return max(0.0, (run / CURVES).stat().st_mtime - note["start"]) / 60
    return note.get("minutes", 0.0)


def remember(run: Path, key: str) -> None:
    """Let later exams find this run by its fingerprint."""
    write_json(cache_folder() / "exam" / key, {"run": str(run.resolve())})


def remembered(run: Path, key: str) -> Path | None:
    """Another finished run with this fingerprint, that later exams take in place of `run`."""
    pointer = cache_folder() / "exam" / key
    if not pointer.is_file():
        return None
    source = Path(str(read_json(pointer).get("run")))
    if source == run.resolve() or not is_finished(source) or read_note(source).get("fingerprint") != key:
        return None
    return source


def reuse(run: Path, key: str) -> Path | None:
    """Copy the `remembered` run to `run`, without checkpoints; return where it was, or `None`."""
    if (source := remembered(run, key)) is None:
        return None
    # a copy that was cut short has no record, and counts as missing
    left_out = shutil.ignore_patterns(CHECKPOINTS, TENSORBOARD, f"{EVENTS}*")
    last = {str(source): {RECORD}}
    ignore = lambda at, names: left_out(at, names) | last.get(str(at), set())  # noqa: E731
    shutil.copytree(source, run, ignore=ignore, dirs_exist_ok=True)
    shutil.copy2(source / RECORD, run / RECORD)
    write_note(run, **{**read_note(source), "reused_from": str(source)})
    return source
