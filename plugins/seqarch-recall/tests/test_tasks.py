"""The data of the recall tasks follow the published definitions, and oracles solve them from the inputs."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from backoff import backoff
from seqarch_recall import icll, mqar, retrievit, train
from seqarch_recall.examples import IGNORED, distinct, questions
from seqarch_recall.settings import TASKS, find_settings

from seqarch.errors import UserError

score: Any = train.test
"""Wraps an oracle as a model."""


def mqar_oracle(tokens, vocab_size):
    first = next(i for i in range(0, len(tokens), 2) if not 1 <= tokens[i] < vocab_size // 2 <= tokens[i + 1])
    pairs = dict(zip(tokens[:first:2], tokens[1:first:2], strict=True))
    return [pairs.get(token, 0) for token in tokens]


def ngram_oracle(tokens):
    tokens, (bos, query) = list(tokens), (30, 31)
    at = tokens.index(query)
    q1, q2 = tokens[at + 1 : at + 3]
    start = next(i for i in range(1, at) if tokens[i : i + 2] == [q1, q2])
    answers = [bos] * len(tokens)
    answers[at + 3 : at + 6] = tokens[start + 2 : start + 5]
    return answers


def position_oracle(tokens, symbols):
    return [0] * (len(tokens) - 1) + [symbols + list(tokens[1 : symbols + 1]).index(tokens[-1])]


class Oracle(torch.nn.Module):
    """A model that gives a function's answers."""

    def __init__(self, answer, vocab_size):
        super().__init__()
        self.answer, self.vocab_size = answer, vocab_size
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def answers(self, tokens, places):
        said = torch.tensor([self.answer(row) for row in tokens.tolist()])
        return torch.nn.functional.one_hot(said.gather(1, places), self.vocab_size).float()


ICLL = icll.examples(2, 20, split="test")
assert ICLL.truth is not None
ALLOWED = ICLL.truth > 0
ICLL_ANSWERS = dict(zip(map(tuple, ICLL.inputs.tolist()), ALLOWED.argmax(-1).tolist(), strict=True))
CASES: dict[str, Any] = {  # examples, size of the vocabulary, whether all answers of an example must be right, oracle
    "mqar": (
        mqar.examples(0, 50, vocab_size=256, length=64, pairs=8, noise=False),
        256,
        False,
        lambda tokens: mqar_oracle(tokens, 256),
    ),
    "ngram": (retrievit.ngram(0, 50), 32, True, ngram_oracle),
    "position": (retrievit.position(0, 50, symbols=40), 82, False, lambda tokens: position_oracle(tokens, 40)),
    "icll": (
        ICLL,
        20,
        False,
        lambda tokens: ICLL_ANSWERS[tuple(tokens)],
    ),  # an automaton cannot be inferred from its strings
}
CHANCES = {
    "mqar": 1 / 256,
    "ngram": 32**-3,
    "position": 1 / 82,
    "icll": ALLOWED[ICLL.targets != IGNORED].sum(-1).mean() / 20,
}


def test_every_task_has_an_oracle_and_a_chance():
    assert CASES.keys() == CHANCES.keys() == set(TASKS)


@pytest.mark.parametrize("task", CASES)
def test_an_oracle_has_all_answers_right_and_a_guess_is_at_chance(task):
    examples, vocab_size, exact, oracle = CASES[task]
    assert score(Oracle(oracle, vocab_size), [examples], exact=exact).accuracy == 1
    torch.manual_seed(0)
    guess = Oracle(lambda tokens: torch.randint(vocab_size, (len(tokens),)).tolist(), vocab_size)
    chance, asked = CHANCES[task], (examples.targets != IGNORED).sum()
    bound = 3 * math.sqrt(chance / (len(examples.targets) if exact else asked))
    assert score(guess, [examples], exact=exact).accuracy == pytest.approx(chance, abs=bound)


def test_one_wrong_answer_fails_an_example_only_where_all_must_be_right():
    examples, vocab_size, *_ = CASES["ngram"]

    def last_wrong(tokens):
        answers = ngram_oracle(tokens)
        answers[list(tokens).index(31) + 5] = 31
        return answers

    assert score(Oracle(last_wrong, vocab_size), [examples], exact=True).accuracy == 0
    assert score(Oracle(last_wrong, vocab_size), [examples], exact=False).accuracy == pytest.approx(2 / 3)


def test_distinct_numbers_are_uniform():
    rows = distinct(np.random.default_rng(0), 20_000, 3, 5)
    assert all(len(set(row)) == 3 for row in rows[:500].tolist())
    for column in rows.T:
        assert np.bincount(column, minlength=5) == pytest.approx(4000, abs=250)


def test_mqar_has_the_published_layout():
    examples = mqar.examples(3, 200, vocab_size=512, length=64, pairs=8, noise=False)
    keys, values = examples.inputs[:, :16:2], examples.inputs[:, 1:16:2]
    assert keys.min() >= 1
    assert keys.max() == 255
    assert values.min() == 256
    assert values.max() == 511
    for row, key, value in zip(examples.inputs, keys, values, strict=True):
        assert len(set(key)) == len(set(value)) == 8
        assert sorted(row[16:][row[16:] > 0]) == sorted(key)
    asked = examples.targets != IGNORED
    assert (asked.sum(1) == 8).all()
    assert (np.nonzero(asked)[1] % 2 == 0).all()
    noisy = mqar.examples(3, 200, vocab_size=512, length=64, pairs=8)
    assert (noisy.targets == examples.targets).all()
    assert (noisy.inputs[examples.inputs > 0] == examples.inputs[examples.inputs > 0]).all()
    assert (noisy.inputs[examples.inputs == 0] > 0).mean() > 0.99


def test_mqar_asks_again_after_gaps_of_the_published_distribution():
    places, power = 20, 0.01
    drawn = mqar.gaps(np.random.default_rng(0), 40_000, 2, places, power)
    p = power * np.arange(1, places + 1) ** (power - 1)
    p /= p.sum()
    first = np.bincount(drawn[:, 0], minlength=places) / 40_000
    assert first == pytest.approx(p, abs=0.008)
    second = p * (p / (1 - p)).sum() - p**2 / (1 - p)  # the place of the second draw without replacement
    assert np.bincount(drawn[:, 1], minlength=places) / 40_000 == pytest.approx(second, abs=0.008)


def test_mqar_refuses_more_pairs_than_fit():
    with pytest.raises(UserError, match="needs an even length of at least 64, not 62"):
        mqar.examples(0, 1, vocab_size=128, length=62, pairs=16)


def test_ngram_queries_occur_once_at_any_place():
    examples = retrievit.ngram(1, 2000)
    lengths, starts = [], []
    for tokens in examples.inputs.tolist():
        at = tokens.index(31)
        sequence, query = tokens[1 : at - 1], tokens[at + 1 : at + 3]
        found = [i for i in range(len(sequence) - 1) if sequence[i : i + 2] == query]
        assert len(found) == 1
        lengths.append(len(sequence))
        starts.append(found[0] / (len(sequence) - 5))
    assert (min(lengths), max(lengths)) == (50, 100)
    assert np.mean(lengths) == pytest.approx(74.4, abs=1)
    assert np.mean(starts) == pytest.approx(0.5, abs=0.03)
    assert (examples.groups == np.array(lengths) // 50 * 50).all()


def test_positions_are_asked_evenly():
    examples = retrievit.position(1, 4000, symbols=20)
    assert all(sorted(row) == list(range(20)) for row in examples.inputs[:100, 1:21].tolist())
    assert np.bincount(examples.groups) == pytest.approx(1000, abs=120)


def test_automata_have_one_to_three_edges_to_different_other_states():
    rng = np.random.default_rng(0)
    counts = []
    for _ in range(300):
        edges = icll.drawn(rng)
        assert 4 <= len(edges) <= 12
        for state, each in enumerate(edges):
            symbols, states = [symbol for symbol, _ in each], [to for _, to in each]
            assert len(set(symbols)) == len(set(states)) == len(each)
            assert state not in states
            assert max(symbols) < 18
            assert max(states) < len(edges)
            counts.append(len(each))
    shares = np.bincount(counts, minlength=4) / len(counts)
    assert shares[0] == 0
    assert shares[1:] == pytest.approx(1 / 3, abs=0.06)


def test_minimised_automata_are_one_value_for_one_language():
    loop = (((0, 1),), ((1, 0),))
    twice = (((0, 1),), ((1, 2),), ((0, 3),), ((1, 0),))
    renamed = (((0, 2),), ((5, 0),), ((1, 0),))  # its second state is never reached
    assert icll.minimised(twice) == icll.minimised(loop) == icll.minimised(renamed) == loop
    assert icll.minimised((((0, 1),), ((0, 0),))) == (((0, 0),),)
    assert icll.minimised((((0, 1),), ((1, 2),), ((0, 1),))) == loop
    assert icll.minimised((((0, 1),), ((2, 0),))) != loop


def test_automata_of_train_and_test_differ():
    splits = {split: icll.examples(0, 10, split=split) for split in ("train", "test")}
    assert splits["train"].truth is None
    rng = np.random.default_rng(0)
    drawn = [icll.minimised(icll.drawn(rng)) for _ in range(1200)]
    share = np.mean([icll.split_of(edges) == "test" for edges in drawn])
    assert share == pytest.approx(1 / 11, abs=0.03)
    assert {icll.split_of(edges) for edges in drawn} == {"train", "test"}


def test_strings_follow_their_automaton():
    examples = icll.examples(2, 30, split="test")
    asked = examples.targets != IGNORED
    assert examples.truth is not None
    answers = np.where(asked, examples.targets, 0)
    assert (np.take_along_axis(examples.truth, answers[..., None], 2)[..., 0][asked] > 0).all()
    assert examples.truth[asked].sum(-1) == pytest.approx(1)
    strings = (examples.inputs == 18).sum(1) + 1
    assert (strings == examples.groups).all()
    assert strings.min() >= 10
    assert strings.max() <= 19
    joined = [row[row < 19] for row in examples.inputs]
    longest = max(len(part) for row in joined for part in "".join(chr(97 + t) for t in row).split(chr(97 + 18)))
    assert 40 < longest <= 49


def test_the_true_distribution_is_always_right_and_has_no_distance():
    examples = icll.examples(2, 20, split="test")

    class Truth(Oracle):
        def answers(self, tokens, places):
            truth = torch.as_tensor(examples.truth)[: len(tokens)]
            chances = truth.gather(1, places[..., None].expand(-1, -1, 18))
            return torch.nn.functional.pad(chances, (0, 2)).clamp_min(1e-9).log()

    scores = score(Truth(None, 20), [examples], exact=False)
    assert scores.accuracy == 1
    assert scores.measures["tvd"] == pytest.approx(0, abs=1e-5)


def test_the_back_off_baseline_gives_the_authors_numbers():
    # predict_with_n_gram_back_off("aba|ab", N=3, backoff=True), worked out by hand; symbols a, b of 2
    found = backoff([0, 1, 0, 2, 0, 1], 2)
    # After "a": context "_a" has occurred once, without a continuation: all to "a", the only symbol seen.
    assert found[0] == pytest.approx([1, 0])
    # After "ab": no continuation of "ab" or "b": unigrams a 1, b 1.
    assert found[1] == pytest.approx([0.5, 0.5])
    # After "aba": "ba" is new; of two "a", one went on with b, and the rest falls to a.
    assert found[2] == pytest.approx([0.5, 0.5])
    # At the second start "__" has been twice, once before a; the other half is for b.
    assert found[3] == pytest.approx([0.5, 0.5])
    # After "_a" twice, once before b.
    assert found[4] == pytest.approx([0.5, 0.5])
    # After "ab" twice, once before a: half, and the rest to b by unigrams.
    assert found[5] == pytest.approx([0.5, 0.5])
    # "aab": of two "a" one went on with a and one with b; at order 3 "aa" went on with b: half, the rest to a.
    third = backoff([0, 0, 0, 1, 0], 3)
    assert third[2] == pytest.approx([0.5 + 0.5 * 1, 0, 0])
    assert third[4] == pytest.approx([0.5, 0.25 + 0.25, 0], abs=0.26)


def test_the_back_off_baseline_beats_unigrams():
    examples = icll.examples(5, 5, split="test")
    assert examples.truth is not None
    distance, unigram = [], []
    for row, targets, truth in zip(examples.inputs, examples.targets, examples.truth, strict=True):
        chances = backoff(row.tolist(), 18)
        plain = backoff(row.tolist(), 18, order=1)
        late = (targets != IGNORED) & (np.arange(len(targets)) > 150)
        distance.append(np.abs(chances - truth)[late].sum(-1).mean() / 2)
        unigram.append(np.abs(plain - truth)[late].sum(-1).mean() / 2)
    assert np.mean(distance) < np.mean(unigram) / 2
    assert np.mean(unigram) > 0.5


def test_settings_of_every_task_make_examples():
    for task in TASKS:
        settings = find_settings(task, "small", {})
        segment = {**settings.options, **settings.test[0], "n": 4}
        assert segment
        asked = questions(find_settings(task, "tiny", {"test": [{**settings.test[0], "n": 4}]}).testing()[0])
        assert asked.answers.max() < max(settings.vocab_size, find_settings(task, "tiny", {}).vocab_size)


def test_another_number_of_tests_keeps_their_split():
    (examples,) = find_settings("icll", "tiny", {"test": [{"n": 5}]}).testing()
    assert examples.truth is not None


def test_published_settings_of_based():
    settings = find_settings("mqar", "small", {})
    assert settings.vocab_size == 8192
    assert sum(each["n"] for each in settings.train) == 180_000
    assert sum(each["n"] * each["length"] for each in settings.train) == 24_320_000
    assert [(each["length"], each["pairs"]) for each in settings.test] == [
        (64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256),
    ]  # fmt: skip
    assert settings.rates == pytest.approx(np.logspace(-3, -1.5, 4), rel=2e-3)
    assert (settings.epochs, settings.batch, settings.dropout, settings.weight_decay) == (32, 256, 0.1, 0.1)
    assert (settings.stop, settings.layers, settings.conv) == (0.99, 2, True)


def test_unknown_settings_are_refused():
    with pytest.raises(UserError, match=r"recall has no option 'epoch': did you mean epochs"):
        find_settings("mqar", "tiny", {"epoch": 1})
    with pytest.raises(UserError, match="recall task 'mqar' has no size 'huge': expected small, zoology or tiny"):
        find_settings("mqar", "huge", {})
    with pytest.raises(UserError, match="unknown recall task 'mqr': did you mean mqar"):
        find_settings("mqr", "tiny", {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": "x"}, r"recall\.epochs is x: expected a whole number"),
        ({"epochs": 0}, r"--epochs must be at least 1, not 0"),
        ({"widths": 3}, r"recall\.widths is 3: expected a list"),
        ({"widths": []}, r"--widths is empty"),
        ({"widths": [64, -8]}, r"--widths must be at least 1, not -8"),
        ({"rates": [0.1, -1.0]}, r"--rates must be positive, not \[0\.1, -1\.0\]"),
        ({"dropout": 2.0}, r"--dropout must lie in 0\.\.1"),
        ({"seed": -1}, r"--seed must lie in"),
        ({"positions": "none of them"}, "expected own, learned or none"),
        ({"train": []}, r"--train is empty"),
        ({"train": [{"pairs": 4}]}, "missing a required argument: 'n'"),
        ({"train": [{"n": 8, "length": 16, "pairs": 2, "vocab_size": 8}]}, "vocab_size must be the same in all"),
        ({"train": [{"n": 128, "length": 32, "pairs": 4}, {"n": 127, "length": 32, "pairs": 8}]}, "segment has 127"),
        ({"rates": [0.1, float("nan")]}, r"--rates must be positive"),
        ({"rates": [float("inf")]}, r"--rates must be positive"),
        ({"batch": 9000}, r"--batch is 9000, but the smallest training segment has 8000"),
        ({"test": [{"n": 5, "lenght": 8}]}, "mqar has no option 'lenght': did you mean length"),
        ({"options": {"vocab_size": "x"}}, r"mqar\.vocab_size is x: expected a whole number"),
        ({"options": {"vocab_size": -5}}, "vocab_size must be at least 1, not -5"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        find_settings("mqar", "tiny", changes)


def test_examples_that_there_are_not_are_refused():
    settings = find_settings("icll", "tiny", {"options": {"symbols": 2}})
    with pytest.raises(UserError, match=r"there are no examples of icll with .*'symbols': 2"):
        settings.testing()


@pytest.mark.parametrize("options", [{"symbols": 1}, {"symbols": 2, "shortest": 50}])
def test_a_query_that_never_occurs_only_once_is_refused(options):
    with pytest.raises(UserError, match=r"there are no examples of ngram with .*: in nearly every sequence the query"):
        find_settings("ngram", "small", {"options": options}).training(0)
