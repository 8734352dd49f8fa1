import itertools
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from seqarch.data.datamodule import TextDataModule
from seqarch.data.loader import BatchPlan
from seqarch.data.prepare import prepare
from seqarch.data.shards import open_domain
from seqarch.errors import UserError
from tests.data.conftest import make_texts, write_jsonl

T = 32


def make_data(root: Path, **options: Any) -> TextDataModule:
    defaults: dict[str, Any] = {
        "train": {"web": 3.0, "code": 1.0},
        "ood": ["far"],
        "sequence_length": T,
        "sequences_per_step": 8,
        "eval_tokens": 10 * T,
        "seed": 5,
    }
    return TextDataModule(str(root), **{**defaults, **options})


def train_samples(data: TextDataModule) -> list[tuple[int, int]]:
    """(domain, index) of an epoch, in order."""
    return [tuple(row) for batch in data.train_dataloader() for row in batch["sample"].tolist()]


def test_batches(shards: Path) -> None:
    data = make_data(shards, micro_batch_size=4)
    loader = data.train_dataloader()
    batches = list(loader)
    assert len(batches) == len(loader)
    assert len(batches) % data.accumulation(1) == 0
    for batch in batches:
        assert batch["tokens"].shape == (4, T + 1)
        assert batch["sample"].shape == (4, 2)
        assert batch["tokens"].dtype == batch["sample"].dtype == torch.int64


def test_a_sample_is_what_stands_on_disk(shards: Path) -> None:
    data = make_data(shards)
    sequences = [open_domain(shards, name).sequences("train", T + 1) for name in ("web", "code")]
    for batch in data.train_dataloader():
        for tokens, (domain, index) in zip(batch["tokens"], batch["sample"].tolist(), strict=True):
            assert torch.equal(tokens, sequences[domain][index])


def test_an_epoch_of_one_domain_has_every_sequence_once(shards: Path) -> None:
    data = make_data(shards, train={"web": 1.0})
    samples = train_samples(data)
    n_sequences = len(open_domain(shards, "web").sequences("train", T + 1))
    assert len(samples) == n_sequences // 8 * 8
    assert len(set(samples)) == len(samples)


def test_the_weights_hold(shards: Path) -> None:
    counts = Counter(domain for domain, _ in train_samples(make_data(shards)))
    assert counts[0] / counts[1] == pytest.approx(3, rel=0.05)


def test_the_order_follows_from_the_seed(shards: Path) -> None:
    first = train_samples(make_data(shards))
    assert train_samples(make_data(shards)) == first
    assert train_samples(make_data(shards, num_workers=2)) == first
    assert train_samples(make_data(shards, micro_batch_size=2)) == first
    assert train_samples(make_data(shards, seed=6)) != first


@pytest.fixture
def many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A domain, web, of many shards of 12 sequences."""
    monkeypatch.setattr("seqarch.data.assemble.CHUNK_TOKENS", 12 * (T + 1))
    prepare([write_jsonl(tmp_path / "web.jsonl", make_texts(40, 0))], tmp_path / "root", "web", "byte", workers=1)
    return tmp_path / "root"


@pytest.mark.parametrize("many", [True, False])
def test_a_training_sample_is_spread_over_few_shards(many_shards: Path, shards: Path, many: bool) -> None:
    """Fetching all shards of a split would take long."""
    root = many_shards if many else shards
    sequences = open_domain(root, "web").sequences("train", T + 1)
    rows = [sequence.tolist() for sequence in sequences]
    data = make_data(root, train={"web": 2.0}, ood=[])
    ((share, sample, _),) = data.training_sample(24 * T + T - 1)
    n_shards = len(sequences.counts)
    assert (n_shards > 8) == many
    within = [12 * (i * n_shards // 8) + row for i in range(8) for row in (0, 4, 8)]
    expected = within if many else [i * len(rows) // 24 for i in range(24)]
    assert (share, [rows.index(row) for row in sample.tolist()]) == (1, expected)


@pytest.mark.parametrize("window", [None, 2])
def test_the_window_takes_shards_group_by_group(many_shards: Path, window: int | None) -> None:
    options: dict[str, Any] = {"train": {"web": 1.0}, "ood": [], "shuffle_window": window}
    whole = train_samples(make_data(many_shards, **options))
    files = [index // 12 for _, index in whole]
    assert (len(set(files[:12])) == 2) == (window is not None)
    assert train_samples(make_data(many_shards, num_workers=2, micro_batch_size=2, **options)) == whole


@pytest.mark.parametrize(("window", "pages"), [(None, 1 << 30), (2, 1), (2, 1 << 30)])
def test_this_window_and_the_next_are_read_ahead(
    many_shards: Path, monkeypatch: pytest.MonkeyPatch, window: int | None, pages: int
) -> None:
    """Shards go to memory if they fit. Without windows a run may need little of the domain."""
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": pages}.__getitem__)
    advised: list[Path] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda file, *rest: advised.append(Path(os.readlink(f"/proc/self/fd/{file}")))
    )
    loader = make_data(many_shards, train={"web": 1.0}, ood=[], shuffle_window=window).train_dataloader()
    dataset, order = loader.dataset, loader.order.domains[0]
    shards = dataset.sequences[0].shards
    for group in range(3):
        turn = next(turn for turn in range(order.size) if order.group(turn) == group) if window else 0
        advised.clear()
        dataset[0, turn, 0]
        if dataset.cache._reader:
            dataset.cache._reader.join()
        wanted = [*order.shards_of(group), *order.shards_of(group + 1)] if window and pages > 1 else []
        assert {path.name for path in advised} == {shards.paths[shard].name for shard in wanted}


def test_the_next_epoch_goes_on(shards: Path) -> None:
    data = make_data(shards, train={"web": 1.0})
    loader = data.train_dataloader()
    first, second = ([row for batch in loader for row in batch["sample"].tolist()] for _ in range(2))
    assert first != second
    assert loader.position == 2 * len(loader)


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 2), (2, 2), (4, 2), (2, 8), (8, 1)])
def test_a_step_has_the_same_samples_on_any_number_of_devices(world_size: int, micro_batch_size: int) -> None:
    for step in (0, 1, 7):
        positions: list[int] = []
        for rank in range(world_size):
            plan = BatchPlan(micro_batch_size, world_size, rank, batches_per_epoch=10)
            accumulation = 16 // plan.sequences_per_micro_step
            micro_steps = range(step * accumulation, (step + 1) * accumulation)
            positions += plan.positions(micro_steps).ravel().tolist()
        assert sorted(positions) == list(range(16 * step, 16 * (step + 1)))


def test_loading_leaves_the_global_generator_alone(shards: Path) -> None:
    data = make_data(shards, num_workers=1)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(itertools.islice(data.train_dataloader(), 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_sets_are_fixed(shards: Path) -> None:
    sets = make_data(shards).evaluation_sets()
    assert [(each.domain, each.role, each.weight) for each in sets] == [
        ("web", "in_domain", 0.75),
        ("code", "in_domain", 0.25),
        ("far", "ood", 1.0),
    ]
    for each, again in zip(sets, make_data(shards, seed=9, num_workers=1).evaluation_sets(), strict=True):
        assert torch.equal(each.tokens, again.tokens)
        assert each.tokens.dtype == torch.int64
        assert each.tokens.shape == (10, T + 1)


def test_evaluation_sets_are_spread_over_the_hold_out(shards: Path) -> None:
    hold_out = open_domain(shards, "far").sequences("holdout", T + 1)
    rows = [sequence.tolist() for sequence in hold_out]
    tokens = make_data(shards, eval_tokens=3 * T).evaluation_sets()[-1].tokens
    places = [rows.index(row) for row in tokens.tolist()]
    assert places == [0, len(rows) // 3, 2 * len(rows) // 3]


def test_an_evaluation_set_has_many_documents_however_long_some_are(tmp_path: Path) -> None:
    """A tenth of the documents has nine tenths of the text, so evenly spread sequences meet few of the others."""
    texts = ["".join(f"{i}:{j} " for j in range(600 if i % 10 == 0 else 8)) for i in range(60)]
    prepare([write_jsonl(tmp_path / "far.jsonl", texts)], tmp_path / "root", "far", "byte", holdout=0.8)
    prepare([write_jsonl(tmp_path / "web.jsonl", texts)], tmp_path / "root", "web", "byte", holdout=0.5)

    def documents(**options: int) -> list[int]:
        data = make_data(tmp_path / "root", train={"web": 1.0}, sequences_per_step=2, eval_tokens=24 * T, **options)
        each = data.evaluation_sets()[-1]
        domain = open_domain(tmp_path / "root", "far")
        sequences = [sequence.tolist() for sequence in domain.sequences("holdout", T + 1)]
        starts = [place * (T + 1) for place in map(sequences.index, each.tokens.tolist())]
        assert len(set(starts)) == len(each.tokens) == 24
        assert starts == sorted(starts)
        assert [domain.document("holdout", start) for start in starts] == each.documents.tolist()
        return each.documents.tolist()

    spread = documents()
    assert len(set(spread)) < 12
    assert documents(eval_documents=len(set(spread))) == spread
    many = documents(eval_documents=20)
    assert len(set(many)) >= 20
    assert max(many) - min(many) > 30
    assert len(set(documents(eval_documents=100))) == 24


def test_an_evaluation_set_has_at_most_the_hold_out(shards: Path) -> None:
    data = make_data(shards, eval_tokens=10**9)
    for each in data.evaluation_sets():
        assert len(each.tokens) == len(open_domain(shards, each.domain).sequences("holdout", T + 1))


def test_hold_outs_are_whole(shards: Path) -> None:
    data = make_data(shards)
    for hold_out, each in zip(data.hold_outs(), data.evaluation_sets(), strict=True):
        assert (hold_out.domain, hold_out.role, hold_out.weight) == (each.domain, each.role, each.weight)
        expected = list(open_domain(shards, each.domain).sequences("holdout", T + 1))
        assert torch.equal(torch.stack(list(hold_out.tokens)), torch.stack(expected))


def test_samples_are_described_by_their_documents(tmp_path: Path) -> None:
    texts = [f"{i:03d} " + "x" * 60 for i in range(30)]
    prepare([write_jsonl(tmp_path / "news.jsonl", texts)], tmp_path / "root", "web", "byte", holdout=0.3)
    data = make_data(tmp_path / "root", train={"web": 1.0}, ood=[], sequences_per_step=2)
    for batch in data.train_dataloader():
        for tokens, description in zip(batch["tokens"].tolist(), data.describe(batch["sample"]), strict=True):
            # A document has 65 tokens, so a sequence of 33 lies in one or two of them, and 61 tell their number.
            text = bytes(token for token in tokens if token < 256).decode()
            place = description.removeprefix("web: news.jsonl line")
            named = [int(number) for number in place.removeprefix("s").replace("-", ",").split(",")]
            numbers = {int(word) for word in text.replace("x", " ").split() if len(word) == 3}
            assert len(named) <= 2
            assert {number + 1 for number in numbers} <= set(named)


def test_unigram_entropy(shards: Path) -> None:
    data = make_data(shards)
    for name in ("web", "code", "far"):
        tokens = torch.tensor([int(token) for token in open_domain(shards, name).sequences("holdout", 1)])
        shares = torch.bincount(tokens)[torch.bincount(tokens) > 0].double() / len(tokens)
        assert data.unigram_entropy(name) == pytest.approx(-(shares * shares.log()).sum().item())


def test_the_tokenizer_is_that_of_the_shards(shards: Path) -> None:
    assert make_data(shards).tokenizer.name == "byte"


def test_sequences_are_sent_to_workers(shards: Path) -> None:
    sequences = open_domain(shards, "web").sequences("train", T + 1)
    first = sequences[0]
    assert torch.equal(pickle.loads(pickle.dumps(sequences))[0], first)


@pytest.mark.parametrize(("sequences", "micro", "world", "expected"), [(16, 4, 2, 2), (16, None, 4, 1), (16, 16, 1, 1)])
def test_accumulation(sequences: int, micro: int | None, world: int, expected: int) -> None:
    data = TextDataModule(train={"web": 1.0}, sequences_per_step=sequences, micro_batch_size=micro)
    assert data.accumulation(world) == expected


@pytest.mark.parametrize(("sequences", "micro", "world"), [(16, 3, 1), (16, 8, 3), (10, None, 4), (2, None, 4)])
def test_accumulation_must_divide(sequences: int, micro: int | None, world: int) -> None:
    data = TextDataModule(train={"web": 1.0}, sequences_per_step=sequences, micro_batch_size=micro)
    with pytest.raises(UserError, match=r"x devices=[0-9]+ does not divide data.sequences_per_step="):
        data.accumulation(world)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": {}}, "data.train is empty"),
        ({"root": ""}, "data.root is empty: give it a value"),
        ({"train": {"web": 0.0}}, "data.train.web must be positive, not 0.0"),
        ({"train": {"web": 1e308, "far": 1e308}}, "web must be positive, and at most 1e\\+300, not 1e\\+308"),
        ({"train": {"web": -1.0}}, "must be positive"),
        ({"train": {"web": math.nan}}, "must be positive"),
        ({"train": {"web": math.inf}}, "must be positive"),
        ({"ood": ["web"]}, "'web' is named twice"),
        ({"ood": ["far", "far"]}, "'far' is named twice"),
        ({"sequence_length": 0}, "data.sequence_length must be at least 1, not 0"),
        ({"micro_batch_size": 0}, "data.micro_batch_size must be at least 1"),
        ({"eval_tokens": 0}, "data.eval_tokens must be at least 1"),
        ({"eval_documents": 0}, "data.eval_documents must be at least 1"),
        ({"shuffle_window": 0}, "data.shuffle_window must be at least 1"),
        ({"num_workers": -1}, "data.num_workers must lie in 0..256, not -1"),
        ({"num_workers": 10**5}, "data.num_workers must lie in 0..256, not 100000"),
    ],
)
def test_wrong_options(shards: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_data(**{"root": shards, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": {"wbe": 1.0}}, "unknown domain in .*: did you mean web"),
        ({"ood": ["cod"]}, "did you mean code"),
        ({"train": {"mix": 1.0}}, "'mix' has mixtral and 'far' has byte"),
        (
            {"sequence_length": 10**5},
            "the train split of 'web' has [0-9,]+ tokens, and a sequence has 100,001: make data.seq",
        ),
        (
            {"train": {"web": 1.0}, "sequences_per_step": 10**15},
            r"data.sequences_per_step \(at most the seq.*\) must lie in 1..[0-9]+, not 1000000000000000",
        ),
        ({"ood": ["whole"]}, "the holdout split of 'whole' has 0 tokens, .*: prepare it with another --holdout$"),
    ],
)
def test_wrong_data(shards: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    for domain, tokenizer in {"mix": "mixtral", "whole": "byte"}.items():
        prepare([write_jsonl(tmp_path / "x.jsonl", make_texts(20, 0))], tmp_path / "root", domain, tokenizer, holdout=0)
    for domain in ("web", "code", "far"):
        (tmp_path / "root" / domain).symlink_to(shards / domain)
    with pytest.raises(UserError, match=message):
        make_data(tmp_path / "root", **options).setup("fit")


def test_a_root_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        make_data(tmp_path / "absent").setup("fit")


def test_workers_outlive_signals_to_the_whole_group(shards: Path) -> None:
    """A terminal's Ctrl-C also reaches the workers, but the step that is being finished needs their batches."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        batches = iter(make_data(shards, num_workers=1).train_dataloader())
        next(batches)
        for worker in multiprocessing.active_children():
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(worker.pid or 0, number)
        for _ in range(6):  # more than were prepared already
            next(batches)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.commands
def test_a_process_ends_in_the_middle_of_an_epoch(shards: Path) -> None:
    """Its workers ignore signals, but they end with it."""
    script = f"""
from pathlib import Path
from seqarch.data import cache, loader, order, shards
sequences = [shards.open_domain(Path({str(shards)!r}), "web").sequences("train", {T + 1})]
orders = (order.DomainOrder("web", sequences[0].counts, 0, None),)
dataset = loader.MixtureDataset(sequences, cache.ShardCache(sequences, orders, None))
plan = loader.BatchPlan(2, 1, 0, 9)
batches = iter(loader.TrainLoader(dataset, order.SampleOrder(orders, (1.0,)), plan, num_workers=1))
next(batches)"""
    done = subprocess.run([sys.executable, "-c", script], check=True, timeout=120, capture_output=True, text=True)
    assert "is killed by signal" not in done.stderr
    assert "Exception ignored" not in done.stderr
