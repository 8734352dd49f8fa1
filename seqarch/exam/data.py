"""The data of an exam: shards, or text files that become shards, and the identity of their tokens."""

from collections.abc import Sequence
from pathlib import Path

from seqarch.data.corpus import find_root
from seqarch.data.files import READ
from seqarch.data.prepare import prepare
from seqarch.data.shards import is_domain, list_domains, open_domain
from seqarch.errors import UserError, absent, say
from seqarch.runs.files import check_folder

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
    names, known = [*train, *ood], list_domains(folder)
    if {*names} <= {*known}:
        return folder
    files = {name: text_files(folder, name, names) for name in names}
    missing = [name for name in names if not files[name]]
    if missing:
        raise UserError(
            f"--data {folder}: there are neither shards nor text files (such as {missing[0]}.jsonl.zst) of "
            f"{', '.join(missing)}; prepared domains there: {', '.join(known) or 'none'}; "
            "other domains are named with --data.train and --data.ood"
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
