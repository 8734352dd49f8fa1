"""Passkey retrieval: the prompt, an oracle, a model without memory, and lengths that cannot be."""

import re

import pytest
import torch

from seqarch.data.tokenizers import load_tokenizer
from seqarch.errors import UserError
from seqarch.evaluation import Scorer, evaluate
from seqarch.evaluation.passkey import ADJECTIVES, HEAD, NOUNS, Passkey
from tests.evaluation.test_scorer import small_lm

LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LENGTH = 1024


class Finds(Scorer):
    """Answers with the number in the prompt. It is more certain if the number comes later."""

    def __init__(self, tokenizer="byte"):
        super().__init__(small_lm(vocab=257), load_tokenizer(tokenizer))

    def log_likelihood(self, pairs):
        return torch.tensor([[-float(len(answer)), 0.0] for _, answer in pairs], dtype=torch.float64)

    def generate(self, prompts, max_new, stop=()):
        assert self.tokenizer is not None
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        return [" {}.".format(*re.findall(r"is: (\d{7})", text)) for text in texts]


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
        expected = [HEAD.rstrip(), *[LINE] * before, found[0], *[LINE] * after]
        question = f"special magic number for {found[1]} mentioned in the provided text"
        assert lines == [*expected, f"What is the {question}? The {question} is"]
        assert depth == before / (before + after)
        room = LENGTH - 128 - len(model.prompt(tokens))
        assert 0 <= room < len(model.encode(f"{LINE}\n"))


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


def test_lengths_that_cannot_be():
    with pytest.raises(UserError, match="passkey_300 is too short: a prompt has at least 5"):
        Passkey(300).check(Finds())
    model = Finds()
    model.lm.positions = torch.nn.Embedding(512, 16)
    with pytest.raises(UserError, match=r"passkey_1024 .* learned_positions for 512 tokens, fewer than .* 1024"):
        Passkey(LENGTH).check(model)
    with pytest.raises(UserError, match=r"Passkey\.samples must be at least 1"):
        Passkey(samples=0)
