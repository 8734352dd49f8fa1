"""Describes a folder of shards as text for people."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seqarch.data.corpus import find_root
from seqarch.data.manifest import SPLITS, Split
from seqarch.data.shards import Domain, is_domain, known_domains, open_domain
from seqarch.errors import UserError, one_line
from seqarch.tables import aligned

_SAMPLE_TOKENS = 128


def show(root: str | Path) -> str:
    """A table of the domains under `root` and the start of each hold-out, decoded; or what is damaged.

    Args:
        root: a folder of domains, the folder of one domain, or "embedded" for the built-in corpus.

    Raises:
        UserError: `root` holds no prepared domain.
    """
    domains = domains_of(root)
    _, messages = _each_split(domains, lambda domain, split: domain.sequences(split, 1))
    damaged = [f"damaged: {one_line(message)}" for message in messages]
    return "\n".join(dict.fromkeys([_table(domains), *damaged, *(_sample(domain) for domain in domains)]))


def check(root: str | Path) -> str:
    """Read every file of the domains under `root` and compare it with its checksum; what was compared, as text.

    Raises:
        UserError: files are missing or damaged; the message names them.
    """
    found, damaged = _each_split(domains_of(root), lambda domain, split: (domain.name, split, *domain.check(split)))
    if damaged:
        raise UserError("; ".join(damaged))
    lines = (f"{name}, {split}: {files} files, {size / 1e6:,.1f} MB, as prepared" for name, split, files, size in found)
    return "\n".join(lines)


def domains_of(root: str | Path) -> list[Domain]:
    """The domains under `root`, or the one that it is; at least one."""
    root = find_root(root)
    return [Domain(root)] if is_domain(root) else [open_domain(root, name) for name in known_domains(root)]


def _each_split(domains: list[Domain], look: Callable[[Domain, Split], Any]) -> tuple[list[Any], list[str]]:
    """The results of `look` for each split of each domain, and the errors."""
    found, errors = [], []
    for domain, split in itertools.product(domains, SPLITS):
        try:
            found.append(look(domain, split))
        except UserError as error:
            errors.append(str(error))
    return found, errors


def _table(domains: list[Domain]) -> str:
    rows = [["domain", "split", "documents", "tokens", "MB of text", "nats per token", "tokenizer"]]
    for domain, split in itertools.product(domains, SPLITS):
        summary = domain.manifest.splits[split]
        figures = (f"{summary.documents:,}", f"{summary.tokens:,}", f"{summary.text_bytes / 1e6:,.2f}")
        rows.append([domain.name, split, *figures, f"{summary.unigram_entropy:.3f}", domain.manifest.tokenizer])
    note = "nats per token: unigram entropy, the loss of a model that knows only token frequencies"
    return "\n".join([*aligned(rows, right=range(2, 6)), note, ""])


def _sample(domain: Domain) -> str:
    split = max(SPLITS, key=lambda split: (domain.manifest.splits[split].tokens > 0, split == "holdout"))
    n_tokens = min(_SAMPLE_TOKENS, domain.manifest.splits[split].tokens)
    tokenizer = domain.tokenizer
    try:
        tokens = domain.sequences(split, n_tokens)[0].tolist()
        where = domain.describe(split, 0, n_tokens)
    except UserError as error:
        return f"damaged: {one_line(error)}"
    by_end = itertools.groupby(tokens, key=lambda token: token == tokenizer.eos_id)
    text = "\n---\n".join(tokenizer.decode(list(document)) for is_end, document in by_end if not is_end)
    lines = [f"    {line}" for line in text.split("\n")]
    return "\n".join([f"{domain.name}, {split}, from {where}:", *lines, ""])
