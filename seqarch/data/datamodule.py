"""`TextDataModule`: training mixtures, fixed evaluation sets and exact resume over prepared domains."""

import functools
import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from lightning import LightningDataModule
from torch import Tensor

from seqarch.arguments import FILLED, Count, Interval, Limited, Seed, divide
from seqarch.data.cache import ShardCache
from seqarch.data.corpus import find_root
from seqarch.data.loader import BatchPlan, DocumentCollate, MixtureDataset, TrainLoader
from seqarch.data.manifest import Split
from seqarch.data.order import DomainOrder, SampleOrder
from seqarch.data.packing import (
    DocumentSequences,
    EvaluationSet,
    HoldOut,
    Pack,
    WholeDocuments,
    segments_of,
    spread,
    usual_documents,
    usual_lengths,
)
from seqarch.data.remote import is_remote
from seqarch.data.shards import Domain, PackedSequences, open_domain
from seqarch.data.tokenizers import Tokenizer
from seqarch.errors import UserError, several

REMOTE_WINDOW = 8
"""Shards in a window where the data lie in object storage."""
SAMPLE_SHARDS = 8
"""Shards of a domain that a sample of its training split is taken from, at most."""
MOST_WORKERS = 256
"""The largest `num_workers`: each is a process."""
Weight = Annotated[float, Interval(0, 1e300, "(]")]
"""A weight of a domain, so small that a sum of them is finite."""


class TextDataModule(Limited, LightningDataModule):
    """Packed sequences of T+1 tokens from prepared domains.

    The order of training samples is a pure function of the seed and the position, so every model sees the same samples
    at the same step. The position is part of a checkpoint.

    Args:
        root: folder of prepared domains, or its URL in object storage (s3://bucket/folder); "embedded" is the built-in
            corpus, built on first use.
        train: training domains and their weights, which may have any sum.
        ood: domains that are only evaluated.
        sequence_length: T, predictions per sequence.
        sequences_per_step: sequences of an optimizer step, over all devices and micro-batches.
        micro_batch_size: sequences that one device takes at once; by default all of its share of a step.
        eval_tokens: most predictions in an evaluation set; rounded down to whole sequences, at least one.
        eval_documents: fewest documents in an evaluation set, where the hold-out and `eval_tokens` have as many. Long
            documents then leave sequences to short ones.
        shuffle_window: shards (of 64 MiB) whose samples are shuffled together before training goes on to the next
            ones; by default all shards of a domain, or 8 where they lie in object storage.
        cache_gb: most disk space for shards of the training splits that lie in object storage; by default as little as
            possible. Shards on a disk are read where they lie and take none.
        num_workers: loader processes; 0 reads in the training process.
        document_mask: no token sees another document, and positions restart at each. The first token of a document is
            not a target, and the loss is the mean over the targets of a step. Hold-outs are measured in the same way.
        pack: "cut" takes sequences from the stream of tokens, "whole" fills them with whole documents, which needs
            `document_mask`. Documents that are longer than a sequence are cut.
        seed: decides the order of the training samples. The default is `seed_everything` on the command line and 0 in
            Python.

    Raises:
        UserError: an option cannot be right. What depends on the data is checked when they are opened.
    """

    option_prefix = "data."

    def __init__(
        self,
        root: Annotated[str, FILLED] = "embedded",  # an empty one would stand for the folder that the user is in
        train: dict[str, Weight] | None = None,
        ood: list[str] | None = None,
        sequence_length: Count = 256,
        sequences_per_step: Count = 16,
        micro_batch_size: Count | None = None,
        eval_tokens: Count = 65536,
        eval_documents: Count = 1,
        shuffle_window: Count | None = None,
        cache_gb: float | None = None,
        num_workers: Annotated[int, Interval(0, MOST_WORKERS, "[]")] = 0,
        seed: Seed | None = None,
        document_mask: bool = False,
        pack: Pack = "cut",
    ) -> None:
        super().__init__()
        self.root = root
        self.train = {str(name): weight for name, weight in (train or {}).items()}  # YAML reads 2024 as a number
        self.ood = several(ood or [])
        self.sequence_length = sequence_length
        self.sequences_per_step = sequences_per_step
        self.micro_batch_size = micro_batch_size
        self.eval_tokens, self.eval_documents = eval_tokens, eval_documents
        self.shuffle_window = shuffle_window
        self.cache_gb = cache_gb
        self.num_workers = num_workers
        self.seed = seed or 0
        self.document_mask, self.pack = document_mask, pack
        self._check_options()
        self._train_loader: TrainLoader | None = None
        self._resume: dict[str, Any] | None = None

    def __repr__(self) -> str:
        text = ", ".join(f"{name} {weight:g}" for name, weight in self.train.items())
        unseen = f", OOD {', '.join(self.ood)}" if self.ood else ""
        return f"<TextDataModule: {text}{unseen}; sequences of {self.sequence_length:,} tokens from {self.root}>"

    __str__ = __repr__  # Lightning's says that there are no loaders yet

    def _check_options(self) -> None:
        FILLED.check("data.train", self.train)
        if twice := next((name for name in self.ood if [*self.train, *self.ood].count(name) > 1), None):
            raise UserError(f"the OOD domain '{twice}' is named twice in data.train and data.ood: name it once")
        if self.pack == "whole" and not self.document_mask:
            raise UserError("data.pack is whole, which fills sequences up: set data.document_mask to true")

    def prepare_data(self) -> None:
        """Build the embedded corpus if it is wanted and not there yet."""
        find_root(self.root)

    def setup(self, stage: str) -> None:
        """Open the domains; a fit starts at the beginning unless a checkpoint says otherwise."""
        there = sum(map(len, self._splits[: len(self.train)]))
        if stage == "fit":
            self._resume = self._train_loader = None
            option = "data.sequences_per_step (at most the sequences of the training splits)"
            Interval(1, there, "[]").check(option, self.sequences_per_step)

    def read_from(self, root: str) -> None:
        """Take the domains from another place than so far."""
        self.root = root
        for cached in ("_splits", "_sets"):
            self.__dict__.pop(cached, None)

    @functools.cached_property
    def _splits(self) -> list[PackedSequences]:
        """The training splits, then the hold-outs of the training and of the OOD domains."""
        folder = find_root(self.root)
        domains = [open_domain(folder, name) for name in (*self.train, *self.ood)]
        by_tokenizer = {each.manifest.tokenizer: f"'{each.name}' has {each.manifest.tokenizer}" for each in domains}
        if len(by_tokenizer) > 1:
            raise UserError(f"domains must share a tokenizer, but {' and '.join(by_tokenizer.values())}: prepare again")
        training = [self._open(domain, "train") for domain in domains[: len(self.train)]]
        return training + [self._open(domain, "holdout") for domain in domains]

    def _open(self, domain: Domain, split: Split) -> PackedSequences:
        sequences: PackedSequences = domain.sequences(split, self.sequence_length + 1)
        if self.document_mask:
            kind = WholeDocuments if self.pack == "whole" else DocumentSequences
            sequences = kind(domain, split, self.sequence_length + 1)
        if not len(sequences):
            tokens = domain.manifest.splits[split].tokens
            few = f"{tokens:,} tokens, and a sequence has {self.sequence_length + 1:,}"
            advice = "make data.sequence_length smaller" if tokens else "prepare it with another --holdout"
            raise UserError(f"the {split} split of '{domain.name}' has {few}: {advice}")
        return sequences

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all domains."""
        return self._splits[0].domain.tokenizer

    def accumulation(self, world_size: int) -> int:
        """Micro-batches of an optimizer step on `world_size` devices.

        Raises:
            UserError: `sequences_per_step` cannot be dealt out evenly.
        """
        micro_batch_size = self.batch_size(world_size)
        at_once = {"data.micro_batch_size x devices": micro_batch_size * world_size}
        return divide(**{"data.sequences_per_step": self.sequences_per_step, **at_once})

    def batch_size(self, world_size: int) -> int:
        return self.micro_batch_size or max(1, self.sequences_per_step // world_size)

    def train_dataloader(self) -> TrainLoader:
        """Batches of `tokens [b, T+1]` int64 and `sample [b, 2]` int64, for `describe`.

        An epoch is as many whole steps as the training splits have sequences together.
        """
        shares = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        world_size, rank = (shares["num_replicas"], shares["rank"]) if shares else (1, 0)
        accumulation = self.accumulation(world_size)
        if self.trainer is not None and self.trainer.accumulate_grad_batches != accumulation:
            raise UserError(f"trainer.accumulate_grad_batches must be {accumulation}, as data.sequences_per_step asks")
        sequences = self._splits[: len(self.train)]
        orders = tuple(DomainOrder(each.domain.name, each.counts, self.seed, self.window) for each in sequences)
        dataset = MixtureDataset(sequences, ShardCache(sequences, orders, self.cache_gb))
        order = SampleOrder(orders, tuple(self.train.values()))
        steps_per_epoch = max(1, sum(order.size for order in orders) // self.sequences_per_step)
        plan = BatchPlan(self.batch_size(world_size), world_size, rank, steps_per_epoch * accumulation, accumulation)
        most = [
            usual_documents(each, plan.micro_batch_size) for each in sequences if isinstance(each, DocumentSequences)
        ]
        collate = DocumentCollate(max(most), accumulation * world_size) if most else None
        self._train_loader = TrainLoader(dataset, order, plan, self.num_workers, collate)
        if self._resume is not None:
            self._train_loader.position = self._position(self._resume, plan)
        return self._train_loader

    @property
    def window(self) -> int | None:
        """`shuffle_window`, or that of object storage."""
        return self.shuffle_window or (REMOTE_WINDOW if is_remote(self.root) else None)

    def state_dict(self) -> dict[str, Any]:
        """The position in the training stream, and what must be the same for it to mean the same samples."""
        if (loader := self._train_loader) is None:
            return {}
        batches = {"position": loader.position, "sequences_per_micro_step": loader.plan.sequences_per_micro_step}
        return {**batches, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        counts = [state_dict[name] for name in ("position", "sequences_per_micro_step")] if state_dict else []
        if not all(isinstance(count, int) and 0 <= count < 2**53 for count in counts):
            raise UserError(f"the checkpoint's position in the data is damaged: {counts}")
        json.dumps(state_dict)  # raises `TypeError` for what cannot be compared
        self._resume = state_dict or None

    def changed_since(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The values in a checkpoint's `state_dict` that are others now, so that its position means other samples."""
        before = {"document_mask": False, "pack": "cut", **state}  # those of earlier versions

        def ordered(value: Any) -> Any:  # samples depend on the order of the domains too
            return [*value.items()] if isinstance(value, dict) else value

        now = self._identity()
        return {what: before.get(what) for what in now if ordered(before.get(what)) != ordered(now[what])}

    def _identity(self) -> dict[str, Any]:
        checksums = "".join(each.shards.summary.sha256 for each in self._splits[: len(self.train)])
        return {
            "train": self.train,
            "sequence_length": self.sequence_length,
            "sequences_per_step": self.sequences_per_step,
            "seed": self.seed,
            "shuffle_window": self.window,
            "document_mask": self.document_mask,
            "pack": self.pack,
            "shards": hashlib.sha256(checksums.encode()).hexdigest(),
        }

    def _position(self, resume: dict[str, Any], plan: BatchPlan) -> int:
        """The number of batches done at a checkpoint, counted in batches of the present number of processes."""
        for what, before in self.changed_since(resume).items():
            now = self._identity()[what]
            raise UserError(f"{what} is {now} but was {before} when the checkpoint was written: resume with the same")
        before, now = resume["sequences_per_micro_step"], plan.sequences_per_micro_step
        position, rest = divmod(resume["position"] * before, now)
        if rest:
            raise UserError(f"the checkpoint lies within a step: resume with data.micro_batch_size x devices {before}")
        return position

    def evaluation_sets(self) -> list[EvaluationSet]:
        """The hold-outs of the training domains, then of the OOD domains, each cut to `eval_tokens` predictions.

        The sequences of a set are always the same. They are spread evenly over the hold-out. If they then lie in fewer
        than `eval_documents` documents, so many evenly spread documents give their first sequence, and the rest are
        spread evenly.
        """
        return self._sets

    @functools.cached_property
    def _sets(self) -> list[EvaluationSet]:
        return list(map(self._cut, self.hold_outs()))

    def _cut(self, whole: HoldOut) -> EvaluationSet:
        def document(row: int) -> int:
            return whole.tokens.domain.document("holdout", whole.tokens.token_range(row)[0])

        rows = spread(range(len(whole.tokens)), self.eval_tokens // self.sequence_length)
        if len({*map(document, rows)}) < (fewest := min(self.eval_documents, len(rows))):
            first = {document(row): row for row in reversed(range(len(whole.tokens)))}
            kept = spread(sorted(first.values()), fewest)
            others = spread([row for row in rows if row not in kept], len(rows) - len(kept))
            rows = sorted([*kept, *others][: len(rows)])
        tokens, documents = torch.stack([whole.tokens[row] for row in rows]), torch.tensor([*map(document, rows)])
        segments = None if whole.segments is None else torch.stack([whole.segments[row] for row in rows])
        return EvaluationSet(whole.domain, whole.role, whole.weight, tokens, documents, segments)

    def hold_outs(self) -> list[HoldOut]:
        """The whole hold-outs, in the order of the evaluation sets."""
        total = sum(self.train.values())
        return [
            HoldOut(name, "in_domain", self.train[name] / total, sequences)
            if (name := sequences.domain.name) in self.train
            else HoldOut(name, "ood", 1 / len(self.ood), sequences)
            for sequences in self._splits[len(self.train) :]
        ]

    def checksums(self) -> dict[str, str]:
        """The identity of each domain's tokens: tokenizer and checksums of both splits."""
        manifests = {each.domain.name: each.domain.manifest for each in self._splits[len(self.train) :]}
        return {
            name: " ".join((each.tokenizer, each.splits["train"].sha256, each.splits["holdout"].sha256))
            for name, each in manifests.items()
        }

    def hold_out_checksums(self) -> dict[str, str]:
        """The checksum of the tokens of each whole hold-out, by domain."""
        return {each.domain: each.tokens.shards.summary.sha256 for each in self.hold_outs()}

    def training_sample(self, tokens: int) -> list[tuple[float, Tensor, Tensor | None]]:
        """The share of each training domain in the mixture, sequences `[n, T + 1]` of its training split, and segments.

        The sequences hold the domain's share of `tokens` at most. They are spread evenly over the split, or over
        `SAMPLE_SHARDS` of its shards, so that object storage need not send more.
        """
        total = sum(self.train.values())
        sample = []
        for sequences, weight in zip(self._splits, self.train.values(), strict=False):
            borders = itertools.pairwise(itertools.accumulate(sequences.counts, initial=0))
            shards = [range(first, stop) for first, stop in borders if first < stop]
            rows = list(itertools.chain.from_iterable(spread(shards, SAMPLE_SHARDS)))
            rows = spread(rows, int(tokens * weight / total) // self.sequence_length)
            segments = None if (of := segments_of(sequences)) is None else torch.stack([of[row] for row in rows])
            sample.append((weight / total, torch.stack([sequences[row] for row in rows]), segments))
        return sample

    def document_lengths(self) -> list[int]:
        """Over how many tokens mixers reach in training: lengths of documents, each for equally many tokens."""
        training = [each for each in self._splits[: len(self.train)] if isinstance(each, DocumentSequences)]
        shares = list(self.train.values())
        return usual_lengths(list(zip(shares, training, strict=True))) if training else [self.sequence_length]

    def document_shares(self) -> dict[str, dict[str, float]]:
        """With a document mask, for each training domain what `DocumentSequences.shares` measures."""
        training = self._splits[: len(self.train)]
        return {each.domain.name: each.shares() for each in training if isinstance(each, DocumentSequences)}

    def training_files(self) -> dict[str, str]:
        """The files that the training domains were prepared from: their names ("web-3.jsonl of web") by SHA-256."""
        domains = [sequences.domain for sequences in self._splits[: len(self.train)]]
        return {each.sha256: f"{each.file} of {one.name}" for one in domains for each in one.manifest.sources}

    def val_dataloader(self) -> range:
        """One empty batch: evaluation tasks read what they score from the data module itself."""
        return range(1)

    test_dataloader = val_dataloader

    def describe(self, samples: Tensor) -> list[str]:
        """The documents that each row of a batch's `sample [b, 2]` came from: "web: news.jsonl.zst lines 120-124"."""
        rows = ((self._splits[number], index) for number, index in samples.tolist())
        return [f"{sequences.domain.name}: {sequences.describe(index)}" for sequences, index in rows]

    def unigram_entropy(self, domain: str) -> float:
        """Nats per token of the hold-out for a model that knows only token frequencies: the number to beat."""
        return open_domain(self._splits[0].domain.folder.parent, domain).manifest.splits["holdout"].unigram_entropy
