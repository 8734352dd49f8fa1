"""Losses by evaluation document: what `evaluations/` of a run folder holds, and how documents are drawn again.

Every evaluation of every run uses the same sequences. Other documents in the hold-out would therefore move all points
of all curves together, and no comparison of points can show this. Resampling the documents shows it. They are drawn
with replacement, the same ones for every run (a cluster bootstrap, as in Cameron, Gelbach and Miller 2008, section II).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from seqarch.errors import UserError, refused
from seqarch.runs.files import read_numbers
from seqarch.runs.folder import evaluation_path

Draw = dict[str, np.ndarray]
"""How often each document of an evaluation set was drawn, by the set."""


@dataclass(frozen=True)
class DocumentLosses:
    """The losses of the evaluation sets ("in_domain/docs", "ood/code") by document.

    `loss` maps a set to the sum of the losses of each document's sequences at the K evaluations, `[K, N]`. `sequences`
    maps it to their numbers `[N]`, and `documents` to the documents' indices in the hold-out `[N]`. `weight` maps a
    training domain to its share.
    """

    loss: dict[str, np.ndarray]
    sequences: dict[str, np.ndarray]
    documents: dict[str, np.ndarray]
    weight: dict[str, float]

    def __getitem__(self, kept: np.ndarray) -> "DocumentLosses":
        """The evaluations `kept`."""
        return replace(self, loss={name: sums[kept] for name, sums in self.loss.items()})

    def same_documents(self, other: "DocumentLosses") -> bool:
        """Whether both were measured on the same sequences."""
        return self.documents.keys() == other.documents.keys() and all(
            np.array_equal(self.documents[name], other.documents[name])
            and np.array_equal(self.sequences[name], other.sequences[name])
            for name in self.documents
        )

    def draw(self, random: np.random.Generator) -> Draw:
        """Documents drawn with replacement, set by set."""
        counts = {name: len(documents) for name, documents in self.documents.items()}
        return {name: random.multinomial(n, np.full(n, 1 / n)) for name, n in counts.items()}

    def resampled(self, draw: Draw) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The in-domain loss `[K]` and each domain's loss `[K]` over drawn documents."""
        means = {name: self.loss[name] @ n / (self.sequences[name] @ n) for name, n in draw.items()}
        inside = sum(share * means[f"in_domain/{name}"] for name, share in self.weight.items())
        return np.asarray(inside), {name.partition("/")[2]: mean for name, mean in means.items()}


def common_documents(parts: Sequence[DocumentLosses | None]) -> DocumentLosses | None:
    """The first of some losses, `None` unless all were measured on the same documents."""
    first = parts[0]
    return first if first and all(part and first.same_documents(part) for part in parts) else None


def stack_documents(parts: Sequence[DocumentLosses | None]) -> DocumentLosses | None:
    """The evaluations of several runs one after the other; `None` unless all kept losses of the same documents."""
    first = common_documents(parts)
    if first is None:
        return None
    loss = {name: np.concatenate([part.loss[name] for part in parts if part is not None]) for name in first.loss}
    return replace(first, loss=loss)


def read_documents(
    folder: Path, step: int, train: Mapping[str, float], ood: Sequence[str] = ()
) -> DocumentLosses | None:
    """The losses by document after `step` of a run, `None` if it did not keep them.

    Args:
        folder: the run folder.
        step: of the evaluation.
        train: the training domains and their weights.
        ood: the OOD domains that are compared.

    Raises:
        UserError: a file of `evaluations/` is damaged or lacks one of the domains.
    """
    path = evaluation_path(folder, step)
    if not path.is_file():
        return None
    arrays, loss, sequences, documents = read_numbers(path), {}, {}, {}
    wrong = f"{path} is damaged: remove it, and the run's documents are not resampled"
    with refused(wrong, ValueError, KeyError, TypeError):
        for name in (*(f"in_domain/{name}" for name in train), *(f"ood/{name}" for name in ood)):
            if f"loss/{name}" not in arrays:
                raise UserError(f"{path} has no losses of {name}: it belongs to another run")
            documents[name], index = np.unique(arrays[f"document/{name}"], return_inverse=True)
            loss[name] = np.bincount(index, arrays[f"loss/{name}"].astype(np.float64))[None]
            sequences[name] = np.bincount(index)
    total = sum(train.values())
    return DocumentLosses(loss, sequences, documents, {name: each / total for name, each in train.items()})
