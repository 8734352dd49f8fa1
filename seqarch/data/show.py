"""What a folder of shards holds, as text for people."""

import io
from pathlib import Path

from seqarch.data.shards import SPLITS, Domain, is_domain, list_domains, open_domain
from seqarch.data.tokenizers import load_tokenizer
from seqarch.errors import UserError

_SAMPLE_TOKENS = 128


def show(root: str | Path) -> str:
    """A table of the domains under `root` (or of the one domain `root`), and the start of each hold-out, decoded.

    Raises:
        UserError: `root` holds no prepared domain.
    """
    root = Path(root)
    if is_domain(root):
        domains = [Domain(root)]
    else:
        domains = [open_domain(root, name) for name in list_domains(root)]
    if not domains:
        what = "there is no folder" if not root.exists() else "no prepared domain in"
        raise UserError(f"{what} {root}: prepare one with `seqarch data prepare FILE --out {root} --domain NAME`")
    return "\n".join([_table(domains), *(_sample(domain) for domain in domains)])


def _table(domains: list[Domain]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table("domain", "split", box=None, pad_edge=False)
    for column in ("documents", "tokens", "text MB", "nats a token"):
        table.add_column(column, justify="right")
    table.add_column("tokenizer")
    for domain in domains:
        for split in SPLITS:
            summary = domain.manifest.splits[split]
            figures = (f"{summary.documents:,}", f"{summary.tokens:,}", f"{summary.text_bytes / 1e6:,.1f}")
            table.add_row(domain.name, split, *figures, f"{summary.unigram_entropy:.3f}", domain.manifest.tokenizer)
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(table)
    console.print("nats a token: unigram entropy, the loss of a model that knows token frequencies alone")
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def _sample(domain: Domain) -> str:
    split = max(SPLITS, key=lambda split: (domain.manifest.splits[split].tokens > 0, split == "holdout"))
    n_tokens = min(_SAMPLE_TOKENS, domain.manifest.splits[split].tokens)
    tokens = domain.sequences(split, n_tokens)[0].tolist()
    text = load_tokenizer(domain.manifest.tokenizer).decode(tokens)
    return (
        f"{domain.name}, {split}, from {domain.describe(split, 0, n_tokens)}:\n    "
        + text.replace("\n", "\n    ")
        + "\n"
    )
