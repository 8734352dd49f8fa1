"""Puts tokenised pieces together into the shards of domains."""

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from seqarch.data.manifest import SPLITS, Manifest, Split, SplitSummary, check_name, differing_inputs
from seqarch.data.remote import origin, upload
from seqarch.data.shards import MANIFEST, Domain, Shards, is_domain
from seqarch.data.tokenizer_files import FOLDER, write_tokenizer
from seqarch.data.tokenizers import Tokenizer
from seqarch.data.writer import SplitWriter
from seqarch.errors import UserError, refused
from seqarch.runs.files import check_folder, read_arrays, write_text
from seqarch.safe_yaml import is_word

MOST_DOMAINS = 200
"""Domains that are written at once: each has files of its own open."""


def check_new(folder: Path) -> None:
    """Refuse a folder that holds something other than a domain or the work on one."""
    ours = is_domain(folder) or origin(folder) or any((folder / name).is_dir() for name in (".work", ".parts"))
    if not ours and folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not a prepared domain: choose another domain or output folder")


def check_inputs(folder: Path, job: Manifest) -> None:
    """Refuse a domain that was prepared from other inputs than those of `job`."""
    if is_domain(folder) and (differing := differing_inputs(Domain(folder).manifest, job)):
        instead = "remove it, or choose another domain name or --out"
        raise UserError(f"{folder} was prepared from other inputs ({', '.join(differing)} differ): {instead}")


def check_domain(domain: str) -> None:
    """Refuse a name that no folder can have or that recipes read as something else."""
    check_name(domain)
    if not is_word(domain):
        raise UserError(f"recipes read '{domain}' as another value (YAML): choose a domain name that is only a word")


def assemble(job: Manifest, pieces: Sequence[Path], place: Path, tokenizer: Tokenizer) -> list[Manifest]:
    """The shards of one domain, in `place`, or of all that the pieces name, in folders of their names there."""
    names = [job.domain] if job.domain else _domains(job, pieces)
    folders = {name: place if job.domain else place / name for name in names}
    if not job.domain:
        for folder in folders.values():
            check_new(folder)
            check_inputs(folder, job)
            folder.mkdir(parents=True, exist_ok=True)
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
    return made


def _domains(job: Manifest, pieces: Sequence[Path]) -> list[str]:
    """The names of all domains in the pieces, sorted."""
    names = sorted({str(name) for path in pieces for name in read_arrays(path, only=("domains",))["domains"].flat})
    if not names:
        raise UserError(f"no document in {', '.join(source.file for source in job.sources)}")
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
    found = sum(split.documents for split in manifest.splits.values())
    which = f" of {manifest.domain}" if manifest.domain_field else ""
    if not found:
        names = ", ".join(source.file for source in manifest.sources)
        empty, other = manifest.empty_documents, manifest.short_documents + manifest.long_documents
        why = " of the requested length" if other else f": every text ({empty}) is empty" if empty else ""
        raise UserError(f"no document{which} in {names}{why}")
    if found == 1 and 0 < manifest.holdout < 1:
        hint = "a text file is one document, each line of a JSONL file is one"
        raise UserError(f"one document{which} cannot be split into text to train on and a hold-out: give more ({hint})")
    fell = f"of the {found} documents{which} fell into the hold-out of {manifest.holdout:g}"
    if manifest.holdout > 0 and not manifest.splits["holdout"].documents:
        raise UserError(f"none {fell}: make it larger")
    if manifest.holdout < 1 and not manifest.splits["train"].documents:
        raise UserError(f"all {fell}: make it smaller")


def publish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and all files to object storage if the folder is a mirror, which keeps the hold-out only."""
    for path in sorted(path for part in (FOLDER, *SPLITS) for path in (folder / part).glob("*")):
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
        raise UserError(f"no document in {', '.join(source.file for source in job.sources)} can be added")
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
    publish(folder, Manifest.read(work / MANIFEST))
    (work / MANIFEST).unlink()
