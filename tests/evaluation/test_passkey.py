"""Passkey retrieval: the prompt, an oracle, a model without memory, and lengths that cannot be."""

import json
import re

import pytest
import torch

from seqarch.data.tokenizers import load_tokenizer
from seqarch.errors import UserError
from seqarch.evaluation import Scorer, evaluate
from seqarch.evaluation.passkey import ADJECTIVES, HEAD, NOUNS, Passkey
from seqarch.evaluation.task import Asked
from tests.evaluation.test_scorer import small_lm

LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LENGTH = 1024


class Finds(Scorer):
    """Answers with the number in the prompt. It is more certain if the number comes later."""

    def __init__(self, tokenizer="byte"):
        super().__init__(small_lm(vocab=257), load_tokenizer(tokenizer))

    def log_likelihood(self, pairs, *, cut=False):
        assert not cut
        return torch.tensor([[-float(len(answer)), 0.0] for _, answer in pairs], dtype=torch.float64)

    def generate(self, prompts, max_new, stop=(), *, cut=False):
        assert self.tokenizer is not None
        assert not cut
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        return [" {}.".format(*re.findall(r"is: (\d{7}|[0-9a-f-]{36})", text)) for text in texts]


@pytest.fixture
def essays(tmp_path):
    """A folder with rows of essays: 7 sentences, one of which ends with a question mark."""
    texts = [
        "On reading. It takes time!  So\nwhat? We read on.",
        "Nobody knew version 2.0 of it. They asked. All left.",
    ]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "essays.jsonl").write_text(lines)
    return str(tmp_path)


SENTENCES = [
    "On reading.",
    "It takes time!",
    "So what?",
    "We read on.",
    "Nobody knew version 2.0 of it.",
    "They asked.",
    "All left.",
]


@pytest.mark.parametrize("tokenizer", ["byte", "mixtral"])
def test_the_prompt_has_the_words_of_lm_eval_and_fills_its_length(tokenizer):
    model = Finds(tokenizer)
    assert model.tokenizer is not None
    for index in range(20):
        tokens, value, depth = Passkey(LENGTH).draw(model, index)
        text = model.tokenizer.decode(tokens)
        assert tokens == model.encode(text), "pieces are tokenised as the whole text is"
        found = re.search(r"One of the special magic numbers for (([a-z]+)-([a-z]+)) is: (\d{7})\.", text)
        assert found
        assert (found[2] in ADJECTIVES.split(), found[3] in NOUNS.split(), found[4]) == (True, True, value)
        lines = text.split("\n")
        before, after = lines.index(found[0]) - 1, len(lines) - lines.index(found[0]) - 2
        expected = [HEAD.format(kind="number").rstrip(), *[LINE] * before, found[0], *[LINE] * after]
        question = f"special magic number for {found[1]} mentioned in the provided text"
        assert lines == [*expected, f"What is the {question}? The {question} is"]
        assert depth == before / (before + after)
        room = LENGTH - 128 - len(model.prompt(tokens))
        assert 0 <= room < len(model.encode(f"{LINE}\n"))


@pytest.mark.parametrize("tokenizer", ["byte", "mixtral"])
@pytest.mark.parametrize(
    ("haystack", "kind", "value_of"),
    [("essays", "number", r"\d{7}"), ("uuids", "uuid", r"[0-9a-f]{8}(?:-[0-9a-f]+){4}")],
)
def test_the_value_is_a_sentence_among_those_of_the_essays(essays, tokenizer, haystack, kind, value_of):
    model = Finds(tokenizer)
    assert model.tokenizer is not None
    task = Passkey(LENGTH, 20, haystack, essays)
    assert task.name == f"passkey_{haystack}_{LENGTH}"
    for index in range(20):
        tokens, value, depth = task.draw(model, index)
        text = model.tokenizer.decode(tokens)
        assert tokens == model.encode(text), "pieces are tokenised as the whole text is"
        assert re.fullmatch(value_of, value)
        head, body, question = text.split("\n")
        assert f"{head}\n" == HEAD.format(kind=kind)
        needle = re.search(rf"One of the special magic {kind}s for ([a-z]+-[a-z]+) is: {value}\.", body)
        assert needle
        before, after = (body[: needle.start()].strip(), body[needle.end() :].strip())
        assert body == " ".join(filter(None, (before, needle[0], after)))
        rest = " ".join(filter(None, (before, after)))
        count = next(n for n in range(1, 500) if len(" ".join((SENTENCES * 100)[:n])) >= len(rest))
        assert rest == " ".join((SENTENCES * 100)[:count]), "sentences from the beginning, and again"
        assert before == " ".join((SENTENCES * 100)[: round(depth * count)])
        asked = f"special magic {kind} for {needle[1]} mentioned in the provided text"
        assert question == f"What is the {asked}? The {asked} is"
        room = LENGTH - 128 - len(model.prompt(tokens))
        assert 0 <= room < len(model.encode(f" {(SENTENCES * 100)[count]}")) + 1


def test_a_prompt_never_exceeds_its_length(tmp_path):
    """Mixtral's tokenizer makes one token of " Nobody" and three of "Nobody" after a new line."""
    (tmp_path / "essays.jsonl").write_text('{"text": "Nobody knew. It rained."}')
    model = Finds("mixtral")
    lengths = {
        length: len(model.prompt(Passkey(length, haystack="essays", folder=str(tmp_path)).draw(model, index)[0]))
        for length in range(LENGTH, LENGTH + 12)
        for index in (0, 1)
    }
    assert all(length - 128 >= tokens for length, tokens in lengths.items())


def test_a_line_fills_its_own_room_exactly():
    model = Finds()
    room = 3 * len(model.encode(f"{LINE}\n"))
    assert [len(Passkey(LENGTH)._filler(model, each)) for each in (room - 1, room)] == [2, 3]


def test_each_haystack_hides_another_value_and_each_tokenizer_has_its_own_pieces(essays):
    task, models = Passkey(LENGTH, haystack="essays", folder=essays), (Finds("byte"), Finds("mixtral"))
    for model in models:
        assert model.tokenizer is not None
        tokens, value, _ = task.draw(model, 0)
        assert tokens == model.encode(model.tokenizer.decode(tokens))
        assert value != Passkey(LENGTH).draw(model, 0)[1]


def test_essays_are_tasks_where_they_are_installed(essays, tmp_path):
    asked = {"limit": 3, "lengths": (1024, 2048)}
    found = [task.name for task in Passkey.variants(Asked(rows=essays, **asked))]
    lines, hidden = (
        [f"passkey_{n}" for n in (1024, 2048)],
        [f"passkey_{h}_{n}" for h in ("essays", "uuids") for n in (1024, 2048)],
    )
    assert found == lines + hidden
    assert [task.name for task in Passkey.variants(Asked(rows=str(tmp_path / "none"), **asked))] == lines
    scores = evaluate([Passkey(LENGTH, 4, "uuids", essays)], Finds(), None)
    assert scores.metrics == {f"passkey_uuids_{LENGTH}/contains": 1, f"passkey_uuids_{LENGTH}/log_likelihood": -37}
    files = Passkey(LENGTH, 4, "essays", essays).row_files()
    assert files is not None
    assert list(files.sha256) == ["essays.jsonl"]
    with pytest.raises(UserError, match=r"passkey_essays_1024 needs essays: write them to ROWS/essays\.jsonl"):
        Passkey(LENGTH, haystack="essays", folder=str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"Passkey\.haystack must be lines, essays or uuids, not books"):
        Passkey(LENGTH, haystack="books")  # pyright: ignore[reportArgumentType]
    for wrong in ({"text": " "}, {"text": 3}, {}):
        (tmp_path / "essays.jsonl").write_text('{"text": "One. Two."}\n' + json.dumps(wrong))
        with pytest.raises(UserError, match=r"essays\.jsonl: row 2 has no text: a row has text"):
            Passkey(LENGTH, haystack="essays", folder=str(tmp_path)).check(Finds())


def test_prompts_differ_and_do_not_depend_on_each_other():
    model = Finds()
    drawn = [Passkey(LENGTH).draw(model, index) for index in range(50)]
    assert len({value for _, value, _ in drawn}) == 50
    assert len({depth for _, _, depth in drawn}) > 3
    assert Passkey(LENGTH, samples=3).draw(model, 7) == drawn[7]
    assert Passkey(LENGTH + 1).draw(model, 7)[1] != drawn[7][1]


def test_an_oracle_finds_all_and_a_random_model_none():
    scores = evaluate([Passkey(LENGTH, samples=5)], Finds(), None)
    assert scores.metrics == {f"passkey_{LENGTH}/contains": 1, f"passkey_{LENGTH}/log_likelihood": -8}
    assert scores.samples["depth"].shape == (5,)
    assert scores.chance == {f"passkey_{LENGTH}/contains": 0}
    guess = evaluate([Passkey(LENGTH, samples=2)], Scorer(small_lm(vocab=257), load_tokenizer("byte")), None)
    assert guess.metrics[f"passkey_{LENGTH}/contains"] == 0
    assert guess.metrics[f"passkey_{LENGTH}/log_likelihood"] == pytest.approx(-8 * 5.55, rel=0.1)


@pytest.mark.parametrize(("haystack", "letters"), [("essays", 8), ("uuids", 37)])
def test_an_oracle_finds_all_in_essays_and_a_random_model_none(essays, haystack, letters):
    name = f"passkey_{haystack}_{LENGTH}"
    scores = evaluate([Passkey(LENGTH, 3, haystack, essays)], Finds(), None)
    assert scores.metrics == {f"{name}/contains": 1, f"{name}/log_likelihood": -letters}
    model = Scorer(small_lm(vocab=257), load_tokenizer("byte"))
    guess = evaluate([Passkey(LENGTH, 2, haystack, essays)], model, None)
    assert guess.metrics[f"{name}/contains"] == 0
    assert guess.metrics[f"{name}/log_likelihood"] == pytest.approx(-letters * 5.55, rel=0.1)


def test_lengths_that_cannot_be():
    with pytest.raises(UserError, match="passkey_300 is too short for a prompt of 5"):
        Passkey(300).check(Finds())
    model = Finds()
    model.lm.positions = torch.nn.Embedding(512, 16)
    with pytest.raises(UserError, match=r"passkey_1024 .* learned_positions is 512: a sequence of 1024"):
        Passkey(LENGTH).check(model)
    with pytest.raises(UserError, match=r"Passkey\.samples must be at least 1"):
        Passkey(samples=0)
