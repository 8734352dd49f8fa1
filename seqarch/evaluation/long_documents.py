"""The loss in long documents by position, read in pieces of bounded memory."""

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from seqarch.arguments import Count
from seqarch.data.datamodule import TextDataModule
from seqarch.data.shards import MANIFEST, Domain, list_domains
from seqarch.errors import UserError
from seqarch.evaluation.losses import Edges, mean_by_range
from seqarch.evaluation.rows import RowFiles, find_file, read_rows
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Asked, Scores, Task
from seqarch.runs import tags

EDGES = [2048, 8192, 16384, 32768, 65536, 102400]
ROWS = "long"
"""Name of the file with rows, and of their domain."""


class LongDocuments(Task):
    """The mean loss in ranges of positions of long documents, `loss_by_position/<domain>/<from>-<to>`, in nats.

    All ranges are measured on the same documents: the first ones that have at least as many tokens as the last edge,
    the token that ends a document included. A document is read from its beginning, in pieces through the decoding
    state. Samples are the means of each document.

    The documents are the hold-outs of the domains that are prepared in `folder`, else the texts of `long.jsonl` there,
    else the hold-outs of the run's data.

    Args:
        edges: where ranges after the first begin, then where the last one ends; by default as in `EDGES`.
        documents: documents of each domain, at most.
        folder: with prepared domains or rows with the field text.
    """

    group = "long"
    version = 1
    decodes = True

    def __init__(self, edges: Edges | None = None, documents: Count = 100, folder: str | None = None) -> None:
        self.edges, self.documents, self.folder = edges or EDGES, documents, folder
        self.length = self.edges[-1]
        self.prepared = [Domain(Path(folder, name)) for name in list_domains(Path(folder))] if folder else []
        self.file = None if self.prepared else find_file(folder, ROWS)
        self.reads_data = not self.prepared and self.file is None

    @classmethod
    def variants(cls, asked: Asked) -> list[Task]:
        return [cls(sorted({*(asked.lengths or EDGES)}), asked.limit or 100, asked.rows)]

    def row_files(self) -> RowFiles | None:
        files = {f"{each.name}/{MANIFEST}": each.folder / MANIFEST for each in self.prepared}
        sources = {f"{each.name}/{one.file}": one.sha256 for each in self.prepared for one in each.manifest.sources}
        files |= {self.file.name: self.file} if self.file else {}
        return RowFiles(str(self.folder), files, sources) if files else None

    def check(self, scorer: Scorer) -> None:
        super().check(scorer)
        for domain in self.prepared:
            if scorer.tokenizer is not None and (name := domain.manifest.tokenizer) != scorer.tokenizer.name:
                raise UserError(f"{domain.folder} has the tokenizer {name}, but the model {scorer.tokenizer.name}")
        self._documents(scorer, 1)

    def prepare(self, data: TextDataModule | None) -> None:
        self.texts = [row["text"] for row in read_rows(self.file, "text")] if self.file else []
        of_run = data.hold_outs() if data is not None and self.reads_data else []
        domains = [*self.prepared, *(each.tokens.domain for each in of_run)]
        found = {each.name: each.documents("holdout", self.length) for each in domains}
        self.found = {name: [*itertools.islice(documents, self.documents)] for name, documents in found.items()}

    def score(self, scorer: Scorer) -> Scores:
        found = self._documents(scorer, self.documents)
        begin = scorer.prompt([0])[:-1]
        rows = [torch.from_numpy(np.append(begin, each).astype("int64")) for every in found.values() for each in every]
        ranges = list(itertools.pairwise([0, *self.edges]))
        means = scorer.measure(rows, functools.partial(mean_by_range, ranges=ranges), pieces=True)
        samples = {
            tags.loss_by_position(domain, *between): values.numpy().astype(np.float32)
            for domain, table in zip(found, means.split([len(each) for each in found.values()]), strict=True)
            for between, values in zip(ranges, table.T, strict=True)
            if len(table)
        }
        return Scores.of(samples)

    def _documents(self, scorer: Scorer, most: int) -> dict[str, list[np.ndarray]]:
        """The first `length` tokens of the documents that have so many, by domain; of the texts at most so many."""
        found = {**self.found, ROWS: [*itertools.islice(self._encoded(scorer), most)]} if self.texts else self.found
        if not any(found.values()):
            raise UserError(f"no document of {', '.join(found)} has {self.length:,} tokens: change --lengths or --rows")
        return found

    def _encoded(self, scorer: Scorer) -> Iterator[np.ndarray]:
        """The tokens of the texts that are long enough."""
        every = (np.array([*scorer.encode(text), scorer.text.eos_id]) for text in self.texts)
        return (each[: self.length] for each in every if len(each) >= self.length)
