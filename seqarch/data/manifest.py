"""What manifest.json says of a prepared domain."""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from seqarch.errors import UserError, refused
from seqarch.runs.files import Checked, read_json
from seqarch.runs.tags import MEAN
from seqarch.safe_yaml import is_word
from seqarch.tables import counted

Split = Literal["train", "holdout"]
SPLITS: tuple[Split, ...] = ("train", "holdout")
FORMAT = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""A domain or a file in a split: not a path that leads elsewhere."""


def check_name(domain: str) -> None:
    """Refuse a domain name that cannot be a folder and a plot label.

    Raises:
        UserError: `domain` holds anything but letters, digits, '_', '-' and '.', starts with one of the last three,
            has more than 100 characters, or is "mean".
    """
    if len(domain) > 100 or not NAME.fullmatch(domain):
        expected = "use at most 100 letters, digits, '_', '-' and '.', a letter or digit first"
        raise UserError(f"'{domain[:100]}' is not a domain name: {expected}")
    if domain == MEAN:
        raise UserError(f"'{domain}' is the mean of domains in tables and figures: choose another domain name")


@functools.lru_cache
def check_domain(domain: str) -> None:
    """Refuse a name that no folder can have or that recipes read as something else."""
    check_name(domain)
    if not is_word(domain):
        raise UserError(f"recipes read '{domain}' as another value (YAML): choose a domain name that is only a word")


@dataclass(frozen=True)
class SplitSummary(Checked):
    """One split of a domain.

    `unigram_entropy` is in nats per token. `sha256` is of all tokens, little-endian. `files` holds the SHA-256
    of each file of the split; a manifest written before there was such a list has none.
    """

    documents: int
    tokens: int
    text_bytes: int
    unigram_entropy: float
    sha256: str
    files: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(map(NAME.fullmatch, self.files)):
            raise ValueError("a name in `files` leads out of the folder of the split")


@dataclass(frozen=True)
class Source(Checked):
    """A file that documents were read from."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest(Checked):
    """The content of manifest.json. It is written last, so a domain with a manifest is whole.

    Documents that are empty, or shorter than `min_tokens` or longer than `max_tokens`, were left out and counted.
    `domain_field` and `where` are those of `Preparation`.
    """

    domain: str
    tokenizer: str
    text_field: str
    holdout: float
    sources: tuple[Source, ...]
    empty_documents: int = 0
    splits: dict[Split, SplitSummary] = dataclasses.field(default_factory=dict)
    format: int = FORMAT
    min_tokens: int | None = None
    max_tokens: int | None = None
    short_documents: int = 0
    long_documents: int = 0
    domain_field: str | None = None
    where: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format != FORMAT:
            raise ValueError(self.format)

    @property
    def asked(self) -> str:
        """Its files, and the conditions that their rows must meet, for messages."""
        files = ", ".join(source.file for source in self.sources)
        return f"{files} with --where {' and '.join(self.where)}" if self.where else files

    @property
    def counts(self) -> str:
        """Its documents and tokens, and what was left out."""
        train, held_out = (self.splits[split] for split in SPLITS)
        documents, tokens = train.documents + held_out.documents, train.tokens + held_out.tokens
        left_out = {"empty": self.empty_documents, "too short": self.short_documents, "too long": self.long_documents}
        found = ", ".join(f"{count:,} {which}" for which, count in left_out.items() if count)
        share = f"{held_out.tokens:,} held out" if train.tokens or not tokens else "all held out, none to train on"
        kept = f"{counted(documents, 'document')}, {tokens:,} {self.tokenizer} tokens ({share})"
        return f"{kept}; left out: {found}" if found else kept

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path, key: str | None = None) -> "Manifest":
        """The manifest in a JSON file, or under a key of it.

        Raises:
            UserError: it holds none.
        """
        wrong = f"{path} is not a manifest of this version of seqarch: prepare the domain again"
        with refused(wrong, UserError, ValueError, KeyError, TypeError, AttributeError):
            content = read_json(path)
            return cls._of(content if key is None else content[key], whole=key is None)

    @classmethod
    def _of(cls, fields: dict[str, Any], whole: bool) -> "Manifest":
        fields["sources"] = tuple(Source(**source) for source in fields["sources"])
        splits = SPLITS if whole or fields["splits"] else ()
        fields["splits"] = {split: SplitSummary(**fields["splits"][split]) for split in splits}
        fields["where"] = tuple(fields.get("where", ()))
        return cls(**fields)


INPUTS = (
    "tokenizer", "text_field", "holdout", "min_tokens", "max_tokens", "domain_field", "where", "sources"
)  # fmt: skip
"""What a domain depends on, in addition to the code."""


def differing_inputs(one: Manifest, other: Manifest, inputs: Sequence[str] = INPUTS) -> list[str]:
    """The names of the inputs that two domains do not share."""
    return [name for name in inputs if getattr(one, name) != getattr(other, name)]
