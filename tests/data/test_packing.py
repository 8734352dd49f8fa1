"""Sequences of documents: their borders, sequences of whole documents, and the share of a batch in a step's loss."""

from __future__ import annotations

import itertools
import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqarch.data.datamodule import TextDataModule
from seqarch.data.packing import DocumentSequences, WholeDocuments, as_documents, best_fit, usual_lengths
from seqarch.data.shards import open_domain
from seqarch.errors import UserError
from tests.data.conftest import make_domains
from tests.data.test_resume import ONE, TWO, SaveAt, fit, make_data

T = 32
FILE = 4000
"""Tokens in a file."""
KINDS = {"cut": DocumentSequences, "whole": WholeDocuments}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Domains of several files of tokens, which cut documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.data.assemble.CHUNK_TOKENS", FILE)
        return make_domains(tmp_path_factory.mktemp("shards"))


@pytest.fixture(params=KINDS)
def sequences(request: pytest.FixtureRequest, shards: Path) -> DocumentSequences:
    return KINDS[request.param](open_domain(shards, "web"), "train", T + 1)


def test_segments_follow_the_documents(sequences: DocumentSequences) -> None:
    every = np.arange(len(sequences))
    split = [int(token) for token in sequences.domain.sequences("train", 1)]
    predicted = 0
    for index in every.tolist():
        row, inside = sequences[index].tolist(), sequences.segments(index).tolist()
        for number, group in itertools.groupby(zip(inside, row, strict=True), key=lambda pair: pair[0]):
            tokens = [token for _, token in group]
            if number:
                assert 256 not in tokens[:-1]
            else:
                assert set(tokens) == {256}
        changes = [number for number, _ in itertools.groupby(inside)]
        assert changes in ([*range(1, len(changes) + 1)], [*range(1, len(changes)), 0])
        targets = as_documents(sequences[index][None], sequences.segments(index)[None])["targets"]
        kept = [a == b != 0 for a, b in itertools.pairwise(inside)]
        assert targets[0].tolist() == [token if keep else -100 for token, keep in zip(row[1:], kept, strict=True)]
        assert sequences.targets(np.array([index])).tolist() == [sum(kept)]
        assert sequences.pieces(np.array([index])).tolist() == [len(changes)]
        pieces = [token for start, stop in sequences.ranges(index) for token in split[start:stop]]
        assert row == pieces + [256] * (T + 1 - len(pieces))
        predicted += sum(kept)
    assert sequences.shares()["targets"] == pytest.approx(predicted / len(every) / T)


@pytest.mark.parametrize("length", [T + 1, 500, 900])
def test_cut_sequences_are_those_without_a_mask(shards: Path, length: int) -> None:
    domain = open_domain(shards, "web")
    plain, cut = domain.sequences("train", length), DocumentSequences(domain, "train", length)
    assert [each.tolist() for each in cut] == [each.tolist() for each in plain]
    starts = domain.starts("train").tolist()
    ends = [*starts[1:], domain.manifest.splits["train"].tokens]
    ranges = [plain.token_range(index) for index in range(len(plain))]
    whole = [any(a <= start and end <= b for a, b in ranges) for start, end in zip(starts, ends, strict=True)]
    assert cut.shares()["cut"] == pytest.approx(1 - sum(whole) / len(whole))
    assert cut.shares()["padded"] == 0


@pytest.mark.parametrize("length", [33, 200, 2000])
def test_whole_documents_are_whole_and_all_there(shards: Path, length: int) -> None:
    domain = open_domain(shards, "web")
    sequences = WholeDocuments(domain, "train", length)
    starts = domain.starts("train").tolist()
    ends = [*starts[1:], domain.manifest.splits["train"].tokens]
    pieces = {start: stop for index in range(len(sequences)) for start, stop in sequences.ranges(index)}
    for start, end in zip(starts, ends, strict=True):
        borders = [start, *range(start // FILE * FILE + FILE, end, FILE), end]
        parts = itertools.pairwise(borders)  # of the document in each file
        cuts = [(at, min(at + length, b)) for a, b in parts for at in range(a, b, length)]
        assert [(a, pieces.pop(a)) for a, b in cuts if b - a > 1] == [(a, b) for a, b in cuts if b - a > 1]
    assert not pieces
    shares = sequences.shares()
    filled = sum(b - a for index in range(len(sequences)) for a, b in sequences.ranges(index))
    assert shares["padded"] == pytest.approx(1 - filled / len(sequences) / length)
    assert len(sequences) < 1.1 * filled / length + len(sequences.counts)  # one of each file holds the rest
    cut = [b - a > length or a // FILE < (b - 1) // FILE for a, b in zip(starts, ends, strict=True)]
    assert shares["cut"] == pytest.approx(sum(cut) / len(cut))


def test_best_fit_takes_the_fullest_bin_with_room() -> None:
    draw = random.Random(0)
    sizes = sorted((draw.randint(1, 40) for _ in range(300)), reverse=True)
    rooms: list[int] = []
    for size, place in zip(sizes, best_fit(sizes, 40), strict=True):
        fitting = [room for room in rooms if room >= size]
        if place == len(rooms):
            assert not fitting
            rooms.append(40)
        else:
            assert rooms[place] == min(fitting)
        rooms[place] -= size
    assert len(rooms) <= 1.05 * sum(sizes) / 40 + 1


@pytest.mark.parametrize("pack", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_micro_batches_and_processes_share_the_mean_over_the_targets(
    shards: Path, pack: Any, micro_batch_size: int, world_size: int
) -> None:
    """The loss of a token is its id here. The trainer takes the mean over all that share a step."""
    loaders = []
    for rank in range(world_size):
        data = make_data(shards, TWO, document_mask=True, pack=pack, micro_batch_size=micro_batch_size)
        shares = {"num_replicas": world_size, "rank": rank}
        accumulation = 8 // micro_batch_size // world_size
        data.trainer = types.SimpleNamespace(distributed_sampler_kwargs=shares, accumulate_grad_batches=accumulation)  # pyright: ignore[reportAttributeAccessIssue]
        loaders.append(iter(data.train_dataloader()))
    for _ in range(3):
        batches = [next(loader) for loader in loaders for _ in range(8 // micro_batch_size // world_size)]
        targets = torch.cat([batch["targets"][batch["targets"] >= 0] for batch in batches]).double()
        parts = [batch["targets"].clamp_min(0).sum() * batch["loss_scale"] for batch in batches]
        assert float(sum(parts) / len(parts)) == pytest.approx(float(targets.mean()), rel=1e-6)
    assert len({int((batch["targets"] >= 0).sum()) for batch in batches}) > 1 or micro_batch_size == 4  # unequal shares


def test_batches_have_one_shape(shards: Path) -> None:
    data = make_data(shards, TWO, document_mask=True)
    batches = list(data.train_dataloader())
    assert len({batch["cu_seqlens"].shape for batch in batches}) == 1
    for batch in batches:
        borders = batch["cu_seqlens"].tolist()
        assert borders == sorted(borders)
        assert {row * T for row in range(9)} <= {*borders}
        assert borders[-1] == 8 * T
    rows = torch.arange(1, 9).repeat_interleave(4).int()[None]
    assert as_documents(torch.zeros_like(rows), rows, count=2)["cu_seqlens"].shape == (9,)  # more than expected


def test_half_of_the_tokens_are_in_documents_of_the_lower_lengths(shards: Path) -> None:
    sequences = DocumentSequences(open_domain(shards, "web"), "train", 4 * T + 1)
    lengths = usual_lengths([(0.5, sequences)])
    assert len(sequences) <= 256  # all are looked at
    segments = torch.stack([sequences.segments(row)[:-1] for row in range(len(sequences))])
    tokens = [size for row in segments.tolist() for number in row for size in [row.count(number)]]
    assert lengths == sorted(lengths)
    assert np.mean(lengths) == pytest.approx(np.mean(tokens), rel=0.05)


@pytest.mark.parametrize("pack", KINDS)
def test_resume_is_exact(shards: Path, tmp_path: Path, pack: Any) -> None:
    options: dict[str, Any] = {"document_mask": True, "pack": pack, "micro_batch_size": 4}
    checkpoint = tmp_path / "stopped.ckpt"
    whole = fit(make_data(shards, TWO, **options), tmp_path, SaveAt(2, checkpoint), max_steps=4)
    rest = fit(make_data(shards, TWO, **options, num_workers=1), tmp_path, resume=checkpoint, max_steps=4)
    assert rest.batches == whole.batches[4:]


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({}, {"document_mask": True}, "document_mask is True but was False"),
        ({"document_mask": True}, {}, "document_mask is False but was True"),
        ({"document_mask": True}, {"document_mask": True, "pack": "whole"}, "pack is whole but was cut"),
    ],
)
def test_a_checkpoint_of_another_mask_is_refused(shards: Path, before: Any, now: Any, message: str) -> None:
    data, other = make_data(shards, ONE, **before), make_data(shards, ONE, **now)
    next(iter(data.train_dataloader()))
    other.load_state_dict(data.state_dict())
    with pytest.raises(UserError, match=message):
        other.train_dataloader()


def test_a_checkpoint_from_before_masks_is_one_without(shards: Path) -> None:
    data, other = make_data(shards, ONE), make_data(shards, ONE)
    next(iter(data.train_dataloader()))
    state = {key: value for key, value in data.state_dict().items() if key not in ("document_mask", "pack")}
    other.load_state_dict(state)
    assert other.train_dataloader().position == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pack": "whole"}, "data.pack is whole, which fills sequences up: set data.document_mask to true"),
        ({"pack": "hole", "document_mask": True}, "data.pack must be cut or whole, not hole"),
    ],
)
def test_wrong_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TextDataModule(train=ONE, **options)
