"""From text files to shards: read, tokenise in parallel, split by document, write.

Finished pieces are kept in a work folder until the manifest is written, so an interrupted run resumes where it stopped.
The result depends only on the inputs: neither on the number of workers or machines nor on interruptions.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from seqarch.arguments import Count, Interval, check_fields
from seqarch.data.assemble import add_documents, assemble, check_inputs, check_new, finish_adding
from seqarch.data.files import find_files, is_hub, source_bytes, source_sha256, standard_input
from seqarch.data.manifest import INPUTS, Manifest, Source, check_domain, differing_inputs
from seqarch.data.remote import is_remote, mirror, origin
from seqarch.data.select import Select
from seqarch.data.shards import PARTS, WORK, Domain, is_domain, list_domains
from seqarch.data.sources import CUT, PIECE_BYTES, TEXTS
from seqarch.data.tokenize import tokenize
from seqarch.data.tokenizer_files import FOLDER, find_tokenizer, stored_tokenizer, write_tokenizer
from seqarch.data.tokenizers import Tokenizer
from seqarch.data.verified import sha256_of
from seqarch.errors import UserError, say
from seqarch.runs.files import check_folder, locked, read_json, write_json, write_text

JOB, DONE = "job.json", "done.json"
DEFAULT, TEXT, HOLDOUT = "mixtral", "text", 0.02
"""The tokenizer, the field of texts and the share of documents that is held out, where none is named."""


@dataclass(frozen=True)
class Preparation:
    """How text becomes shards.

    A document falls into the hold-out by the hash of its text, so exact copies fall on one side. Documents keep the
    order of the files. Empty ones are left out and counted. A domain prepared from the same inputs stays as it is.

    Args:
        files: JSONL (plain, .gz or .zst), Parquet, CSV, Arrow or text files (.txt, .md), folders of them, data sets of
            the Hugging Face Hub (hf://datasets/OWNER/NAME), or - for JSONL from standard input.
        out: folder of all domains, or a URL of object storage such as s3://bucket/shards.
        domain: name of the domain that is written.
        tokenizer: 'byte', 'mixtral', a tokenizer.json, a SentencePiece, tiktoken or Tekken file, a folder with one of
            them, the name of a repository of the Hugging Face Hub, or of a plug-in's tokenizer. By default 'mixtral';
            with `append` that of the domain.
        eos_token: the token that ends a document; by default the one that the tokenizer names.
        bos_token: the token that begins a document; by default the one that the tokenizer itself adds, if it does. ""
            is none.
        text_field: field or column that holds the text, by default text; dots lead into objects, as in meta.text. With
            `append` by default that of the domain.
        domain_field: field or column that holds a domain's name: all domains are written at once, in place of `domain`.
            Rows that `append` adds to one of them must name it there too.
        where: conditions that a row must meet, such as int_score>=4 or meta.lang=en. With `append` the domain's
            conditions hold too.
        holdout: share of the documents that is held out, 0 to 1, by default 0.02; with `append` that of the domain.
        min_tokens: leave out documents with fewer tokens; the tokens that end and begin a document count. With `append`
            the domain's limits hold too.
        max_tokens: leave out documents with more tokens.
        append: add the documents of the files to the training split of a domain. Those that the hold-out would take are
            left out, and the hold-out stays as it is.
        part: I/N: take the I-th of N parts of the files, for `seqarch data join`.
        subset: of a data set of the Hub; by default the one that its card names.
        split: of a data set of the Hub, by default train.
        workers: processes; by default as many as there are cores.
    """

    files: Sequence[str | Path]
    out: str | Path
    domain: str | None = None
    tokenizer: str | None = None
    eos_token: str | None = None
    bos_token: str | None = None
    text_field: str | None = None
    domain_field: str | None = None
    where: Sequence[str] = ()
    holdout: Annotated[float, Interval(0, 1, "[]")] | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    append: bool = False
    part: str | None = None
    subset: str | None = None
    split: str | None = None
    workers: Count | None = None

    def run(self) -> list[Manifest]:
        """Tokenise the files into shards, and say what came out; a part gives no domain yet.

        Raises:
            UserError: an input is wrong (the file and line are named), the domain was prepared from other inputs,
                another process is preparing it, or a split would be empty.
        """
        self.check()
        part, n_parts = self._parts()
        if self.domain is not None:
            check_new(self._place)
        piped = list(map(str, self.files)) == ["-"]
        files = [] if piped else find_files(self.files, self.subset, self.split)
        self._check_used(files)
        if piped:
            with standard_input(self._place.parent) as path:
                return self._run([path], 0, 1)
        return self._run(files, part, n_parts)

    def _check_used(self, files: Sequence[Path]) -> None:
        """Refuse an option that these files (none: standard input), or a domain they are added to, would ignore."""
        added = self.append and "with --append, which adds to one domain and keeps its hold-out and tokens"
        is_set = any(str(each).startswith("hf://") and str(each).count("/") == 4 for each in self.files)
        of_a_set = not is_set and "on other files than a data set of the Hub, as hf://datasets/OWNER/NAME"
        reasons = {
            "part": added or (not files and "on standard input"),
            **dict.fromkeys(("domain_field", "holdout"), added),
            **dict.fromkeys(("eos_token", "bos_token"), self.tokenizer is None and added),
            **dict.fromkeys(("subset", "split"), of_a_set),
            "text_field": files and all(path.suffix in TEXTS for path in files) and "on files that are one text each",
        }
        for option, why in reasons.items():
            if why and getattr(self, option) is not None:
                raise UserError(f"--{option} has no effect {why}: leave it out")

    def check(self) -> None:
        """Refuse wrong options before any work."""
        check_fields(self)
        if (self.domain is None) == (self.domain_field is None):
            raise UserError("name the domain with --domain, or the field that holds it with --domain_field")
        if self.domain is not None:
            check_domain(self.domain)
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens must be at most max_tokens, not {self.min_tokens:,} with {self.max_tokens:,}")
        if self.part and is_remote(self.out):
            raise UserError(f"--part needs an --out that all machines see as a folder, not {self.out}")
        _ = self._select.conditions

    @property
    def _place(self) -> Path:
        """The folder that holds the work: that of the domain or, where the rows name it, that of all domains."""
        return (mirror(str(self.out)) if is_remote(self.out) else Path(self.out)) / (self.domain or "")

    def _parts(self) -> tuple[int, int]:
        """The index of the part, from 0, and the number of parts."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.part or "1/1")
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise UserError(f"--part {self.part} is not a part: give I/N with I from 1 to N, such as 2/8")
        return int(found[1]) - 1, int(found[2])

    @property
    def _select(self) -> Select:
        return Select(TEXT if self.text_field is None else self.text_field, self.domain_field, tuple(self.where))

    def _run(self, files: list[Path], part: int, n_parts: int) -> list[Manifest]:
        place = self._place
        if self.append:
            return [self._append(files)]
        tokenizer = self._tokenizer()
        first, stop = (len(files) * each // n_parts for each in (part, part + 1))
        if n_parts > len(files):
            raise UserError(f"--part {self.part}: {n_parts} parts need as many files, but there are {len(files)}")
        job = self._job(tokenizer, _describe(files, range(first, stop)))
        if self.part and is_domain(place):
            raise UserError(f"{place} is a prepared domain: choose another domain name or --out, or remove it")
        if not self.part and not (place / WORK).is_dir() and (done := _prepared(place, job)):
            return done
        folder = place / PARTS / f"{part + 1}-of-{n_parts}" if self.part else place / WORK
        with self._locked(folder) as work:
            if not self.part and (done := _prepared(place, job)):  # in the meantime, or killed before it removed this
                shutil.rmtree(work)
                return done
            self._tokenize(job, files, range(first, stop), tokenizer, work)
            if self.part:
                write_json(work / DONE, _digests(work))
                say(f"{_label(job)}: part {self.part} is done; after all parts: seqarch data join {place}")
                return []
            manifests = assemble(job, sorted(work.glob("piece-??????.npz")), place, tokenizer)
            shutil.rmtree(work)
        say("\n".join(f"{each.domain}: {each.counts}" for each in manifests))
        return manifests

    @contextlib.contextmanager
    def _locked(self, work: Path) -> Iterator[Path]:
        """The work folder, while no other process has it."""
        inside = self._place if self.domain else self._place / work.relative_to(self._place).parts[0]
        check_folder(inside, inside.parent)  # the folder above is the one that the user named
        work.mkdir(parents=True, exist_ok=True)
        with locked(work / "lock", f"another process is preparing {self._place}"):
            yield work

    def _tokenizer(self) -> Tokenizer:
        name = DEFAULT if self.tokenizer is None else self.tokenizer
        tokenizer = find_tokenizer(name, self.eos_token, self.bos_token)
        tokenizer.encode("")
        return tokenizer

    def _job(self, tokenizer: Tokenizer, sources: tuple[Source, ...]) -> Manifest:
        holdout = HOLDOUT if self.holdout is None else self.holdout
        return Manifest(
            self.domain or "", tokenizer.name, self._select.text_field, holdout, sources,
            min_tokens=self.min_tokens, max_tokens=self.max_tokens,
            domain_field=self.domain_field, where=tuple(self.where),
        )  # fmt: skip

    def _tokenize(
        self, job: Manifest, files: list[Path], chosen: range, tokenizer: Tokenizer, work: Path, before: int = 0
    ) -> None:
        """Leave the pieces of the chosen files in the work folder; `before` files are in the domain already."""
        _clear_other_job(work, job, _names(files))
        write_tokenizer(tokenizer, work / FOLDER)
        workers = self.workers or os.cpu_count() or 1
        tokenize(job, files[chosen.start : chosen.stop], chosen.start + before, work, workers)

    def _rules(self, before: Manifest) -> dict[str, Any]:
        """How added documents are read and chosen: by what the domain's manifest states, and by this command."""
        fewest = max(filter(None, (self.min_tokens, before.min_tokens)), default=None)
        most = min(filter(None, (self.max_tokens, before.max_tokens)), default=None)
        own = [f"{before.domain_field}={before.domain}"] if before.domain_field else []
        where = tuple(dict.fromkeys((*own, *before.where, *self.where)))
        field = before.text_field if self.text_field is None else self.text_field
        kept = {"text_field": field, "holdout": before.holdout, "where": where}
        return {**kept, "min_tokens": fewest, "max_tokens": most}

    def _append(self, files: list[Path]) -> Manifest:
        folder = self._place
        where = origin(folder) or folder
        if not is_domain(folder):
            raise UserError(f"{where} is not a prepared domain, so nothing can be added: leave out --append")
        with self._locked(folder / WORK) as work:
            finish_adding(folder, work)
            before = Domain(folder)
            tokenizer = before.tokenizer if self.tokenizer is None else self._tokenizer()
            if tokenizer.name != (known := before.manifest.tokenizer):
                raise UserError(f"{where} has the tokenizer {known}, not {tokenizer.name}: leave out --tokenizer")
            job = dataclasses.replace(self._job(tokenizer, _describe(files)), **self._rules(before.manifest))
            if job.where:
                say(f"{job.domain}: rows must meet {', '.join(job.where)}")
            there = {source.sha256 for source in before.manifest.sources}
            again = [source.file for source in job.sources if source.sha256 in there]
            if len(again) == len(files):  # such as by this command, which was stopped after it
                manifest = before.manifest
            elif again:
                raise UserError(f"{again[0]} is in {where} already: name new files only")
            else:
                self._tokenize(job, files, range(len(files)), tokenizer, work, before=len(before.manifest.sources))
                manifest = add_documents(before, job, sorted(work.glob("piece-??????.npz")), work)
        shutil.rmtree(work)
        say(f"{self.domain}: {manifest.counts}{': added already, nothing to do' if again else ''}")
        return manifest


def prepare(
    files: Sequence[str | Path], out: str | Path, domain: str, tokenizer: str = DEFAULT, **options: Any
) -> Manifest:
    """Prepare one domain. `options` are those of `Preparation`, which says what is refused."""
    return Preparation(files, out, domain, tokenizer, **options).run()[0]


def join(folder: str | Path) -> list[Manifest]:
    """Put the parts of `Preparation.part` together. The shards are those that one run would have written.

    Args:
        folder: the domain's, or that of all domains with `domain_field`, as the parts name it.

    Raises:
        UserError: a part is missing, unfinished or of other inputs; nothing is written.
    """
    place = Path(folder)
    found = {path.name: path for path in (place / PARTS).glob("*-of-*")}
    counts = {name.partition("-of-")[2] for name in found}
    held = " and ".join(sorted(counts)) or "nothing"
    if len(counts) != 1:
        raise UserError(f"{folder} holds parts of {held}: keep those of one `seqarch data prepare --part I/N`")
    n_parts = int(counts.pop())
    parts = [place / PARTS / f"{part}-of-{n_parts}" for part in range(1, n_parts + 1)]
    if missing := [f"{part}/{n_parts}" for part, path in enumerate(parts, 1) if not (path / DONE).is_file()]:
        raise UserError(f"{folder} lacks the part {', '.join(missing)}: prepare it with --part {missing[0]}")
    check_folder(place / PARTS, place)
    if damaged := next((path for path in parts if read_json(path / DONE) != _digests(path)), None):
        raise UserError(f"{damaged} is damaged: remove it, and prepare this part again")
    jobs = [Manifest.read(path / JOB, "job") for path in parts]
    listed = [read_json(path / JOB).get("files") for path in parts]
    for path, job, names in zip(parts, jobs, listed, strict=True):
        if differing := ", ".join([*differing_inputs(job, jobs[0], INPUTS[:-1]), *["files"] * (names != listed[0])]):
            raise UserError(f"{path} was prepared otherwise than part 1 ({differing}): prepare it again")
    job = dataclasses.replace(jobs[0], sources=tuple(source for each in jobs for source in each.sources))
    with locked(place / PARTS / "lock", f"another process is joining {folder}"):
        tokenizer = stored_tokenizer(job.tokenizer, parts[0] / FOLDER)
        pieces = [piece for path in parts for piece in sorted(path.glob("piece-??????.npz"))]
        manifests = assemble(job, pieces, place, tokenizer)
    shutil.rmtree(place / PARTS)
    say("\n".join(f"{each.domain}: {each.counts}" for each in manifests))
    return manifests


def _digests(work: Path) -> dict[str, str]:
    """The SHA-256 of each file of a part."""
    files = [path for path in sorted(work.rglob("*")) if path.is_file() and not path.name.startswith(("lock", DONE))]
    return {path.relative_to(work).as_posix(): sha256_of(path) for path in files}


def _label(job: Manifest) -> str:
    return job.domain or f"domains by {job.domain_field}"


def _names(paths: Sequence[Path]) -> list[str]:
    """Names of files, relative to the folder that they share."""
    parents = [path.parent if is_hub(path) else Path(os.path.abspath(path)).parent for path in paths]
    shared = Path(os.path.commonpath(parents))
    return [(parent / path.name).relative_to(shared).as_posix() for path, parent in zip(paths, parents, strict=True)]


def _describe(paths: Sequence[Path], chosen: range | None = None) -> tuple[Source, ...]:
    """Names, sizes and checksums of the chosen files, by default all."""
    names = _names(paths)
    numbers = range(len(paths)) if chosen is None else chosen
    return tuple(Source(names[i], source_bytes(paths[i]), source_sha256(paths[i])) for i in numbers)


def _prepared(place: Path, job: Manifest) -> list[Manifest]:
    """The domains, if they were prepared from these inputs before; nothing if there is none.

    Raises:
        UserError: the domain was prepared from other inputs.
    """
    if job.domain:
        check_inputs(place, job)
        found = [Domain(place)] if is_domain(place) else []
    elif (place / WORK).is_dir():  # an interrupted run has not written all
        return []
    else:
        every = [Domain(place / name) for name in list_domains(place)]
        found = [each for each in every if not differing_inputs(each.manifest, job)]
    for each in found:
        say(f"{each.name}: {each.manifest.counts}: prepared already, nothing to do")
    return [each.manifest for each in found]


def _clear_other_job(work: Path, job: Manifest, names: list[str]) -> None:
    """Keep finished pieces of the same job; an unfinished other job leaves nothing worth keeping."""
    started = work / JOB
    files = hashlib.sha256("\n".join(names).encode()).hexdigest()
    inputs = json.dumps({"cut": [CUT, PIECE_BYTES], "files": files, "job": dataclasses.asdict(job)}, indent=2)
    if started.is_file() and started.read_text(encoding="utf-8") == inputs:
        say(f"{_label(job)}: going on after an interruption")
        return
    for piece in work.glob("piece-*"):
        piece.unlink()
    (work / DONE).unlink(missing_ok=True)
    write_text(started, inputs)
