"""Recallable tokens, against a plain loop over the definition."""

import itertools
from collections import Counter, defaultdict

import pytest
import torch

from seqarch.evaluation import recall
from seqarch.evaluation.recall import bigrams, frequent_bigrams, recallable

NONE = torch.empty(0, dtype=torch.int64)


def by_definition(rows, frequent=()):
    """For each token but the first: whether it ends a bigram that occurred before and is not frequent."""
    return [
        [
            any((row[s - 1], row[s]) == (row[t - 1], row[t]) for s in range(1, t))
            and (row[t - 1], row[t]) not in frequent
            for t in range(1, len(row))
        ]
        for row in rows
    ]


@pytest.mark.parametrize("vocab", [2, 5, 40])
def test_recallable_tokens_are_those_of_the_definition(vocab):
    rows = torch.randint(vocab, (6, 90), generator=torch.Generator().manual_seed(vocab))
    assert recallable(rows, NONE).tolist() == by_definition(rows.tolist())
    frequent = {(0, 1), (1, 1), (vocab - 1, 0)}
    codes = bigrams(torch.tensor(sorted(frequent))).flatten()
    assert recallable(rows, codes).tolist() == by_definition(rows.tolist(), frequent)


def test_a_document_among_others_is_as_it_is_alone():
    generator = torch.Generator().manual_seed(3)
    row, sizes = torch.randint(3, (60,), generator=generator), [1, 7, 12, 20, 20]
    segments = torch.arange(1, 6).repeat_interleave(torch.tensor(sizes))
    alone = [each for part in row.split(sizes) for each in (False, *by_definition([part.tolist()])[0])]
    assert recallable(row[None], NONE, segments[None]).tolist() == [alone[1:]]


def test_the_second_of_two_equal_bigrams_is_recallable_and_the_order_of_a_bigram_matters():
    assert recallable(torch.tensor([[7, 8, 9, 7, 8, 8, 7, 8]]), NONE).tolist() == [
        [False, False, False, True, False, False, True]
    ]
    assert recallable(torch.tensor([[5, 5, 5, 5]]), NONE).tolist() == [[False, True, True]]
    assert recallable(torch.tensor([[1, 2, 3], [1, 2, 1]]), NONE).tolist() == [[False, False]] * 2, "rows are apart"


def test_large_ids_are_told_apart():
    ids = torch.tensor([[65535, 0, 1, 65536, 2, 0, 65535, 0]])
    assert recallable(ids, NONE).tolist() == by_definition(ids.tolist())


class Sample:
    def __init__(self, *domains):
        self.domains = domains

    def training_sample(self, tokens):
        return self.domains


def test_frequent_bigrams_are_counted_by_the_weights_of_the_mixture(monkeypatch):
    monkeypatch.setattr(recall, "FREQUENT", 0.05)
    generator = torch.Generator().manual_seed(1)
    domains = [
        (0.9, torch.randint(6, (4, 50), generator=generator), None),
        (0.1, torch.randint(9, (7, 50), generator=generator), None),
    ]
    share: dict[tuple[int, int], float] = defaultdict(float)
    for weight, rows, _ in domains:
        pairs = [pair for row in rows.tolist() for pair in itertools.pairwise(row)]
        for pair, count in Counter(pairs).items():
            share[pair] += weight * count / len(pairs)
    expected = sorted(pair for pair, each in share.items() if each > 0.05)
    assert 0 < len(expected) < len(share)
    found = frequent_bigrams(Sample(*domains))  # pyright: ignore[reportArgumentType]
    assert found.tolist() == bigrams(torch.tensor(expected)).flatten().tolist()


def test_a_bigram_is_frequent_above_one_in_a_hundred_thousand():
    pairs = torch.arange(400_000).reshape(200_000, 2)  # each is one in 200,000
    pairs[:2], pairs[2:5] = torch.tensor([1, 1]), torch.tensor([3, 3])
    assert frequent_bigrams(Sample((1.0, pairs, None))).tolist() == bigrams(torch.tensor([[3, 3]])).flatten().tolist()  # pyright: ignore[reportArgumentType]
