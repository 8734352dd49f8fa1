"""Retrieval tasks: which text is right, an oracle, a model without memory, and rows that cannot be used."""

import json

import pytest
import torch

from seqarch.data.tokenizers import ByteTokenizer
from seqarch.errors import UserError
from seqarch.evaluation import Scorer, evaluate
from seqarch.evaluation.cloze import Cloze, contains, question
from tests.evaluation.test_scorer import small_lm

ROWS = [
    {"text": f" Report {n}\nDevice: X{n} (trade name)\nDevice:", "key": "Device", "value": f"x{n} (Trade name) "}
    for n in range(4)
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "fda.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


class Copies(Scorer):
    """Copies what followed the prompt's last line at its earlier place in the text. If there is none, it guesses."""

    def __init__(self):
        super().__init__(small_lm(vocab=257), ByteTokenizer())
        self.prompts = []

    def log_likelihood(self, pairs, *, cut=False):
        known = [bytes(context).count(b"Device:") > 1 for context, _ in pairs]
        return torch.tensor([[-1.0 if each else -5.0, 0.0] for each in known], dtype=torch.float64)

    def generate(self, prompts, max_new, stop=(), *, cut=False):
        self.prompts += [bytes(prompt).decode() for prompt in prompts]
        return [text.rsplit("Device:", 2)[1].partition("\n")[0] for text in self.prompts]


def test_an_oracle_scores_100_percent_and_gains_what_the_text_tells(folder):
    model = Copies()
    scores = evaluate([Cloze("fda", folder=str(folder))], model, None)
    assert scores.metrics == {"fda/contains": 1, "fda/log_likelihood": -1, "fda/gain": 4}
    assert model.prompts[0] == ROWS[0]["text"].strip()
    assert scores.samples["fda/contains"].tolist() == [1] * 4
    assert scores.chance == {"fda/contains": 0, "fda/gain": 0}


def test_the_first_version_takes_texts_and_values_as_they_are(folder):
    model = Copies()
    scores = evaluate([Cloze("fda", prompt="v0", folder=str(folder), limit=2)], model, None)
    assert model.prompts == [row["text"] for row in ROWS[:2]]
    assert scores.metrics["fda_v0/contains"] == 0, "the space behind the value does not follow"
    twice = Copies()
    evaluate([Cloze("fda", prompt="jrt", folder=str(folder), limit=1)], twice, None)
    assert twice.prompts == [f"{ROWS[0]['text'].strip()}\n{ROWS[0]['text'].strip()}"]


def test_an_untrained_model_gains_nothing(folder):
    scores = evaluate([Cloze("fda", folder=str(folder))], Scorer(small_lm(vocab=257), ByteTokenizer()), None)
    assert scores.metrics["fda/contains"] == 0
    assert abs(scores.metrics["fda/gain"]) < 3, "of about 90 nats"
    assert scores.metrics["fda/log_likelihood"] < -60


def test_the_gain_compares_with_the_question_only(folder):
    scorer = Scorer(small_lm(vocab=257), ByteTokenizer())
    found = evaluate([Cloze("fda", folder=str(folder), limit=1)], scorer, None)
    value = b" x0 (Trade name)"
    pairs = [(ROWS[0]["text"].strip().encode(), value), (b"Device:", value)]
    known, guessed = scorer.log_likelihood(pairs)[:, 0].tolist()
    assert found.metrics["fda/log_likelihood"] == pytest.approx(known, rel=1e-6)
    assert found.metrics["fda/gain"] == pytest.approx(known - guessed, abs=1e-5)


def test_long_texts_are_cut_on_the_left_and_counted(tmp_path, monkeypatch):
    read = []

    def write(lm, prompts, *args, **options):
        read.extend(len(prompt) for prompt in prompts)
        return [torch.zeros(0, dtype=torch.int64)] * len(prompts)

    monkeypatch.setattr("seqarch.evaluation.scorer.generate", write)
    rows = [{**ROWS[0], "text": "x" * n + "\nDevice:"} for n in (10, 43, 44, 300)]
    (tmp_path / "fda.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole, cut = (Scorer(small_lm(vocab=257), ByteTokenizer(), length=length) for length in (None, 100))
    found = evaluate([Cloze("fda", folder=str(tmp_path))], cut, None)
    assert found.cut == 2, "48 of 100 tokens are for the answer, one for EOS"
    assert {*read} == {19, 52}
    value = b" x0 (Trade name)"
    pairs = [(b"x" * n + b"\nDevice:", value) for n in (10, 43, 44)]
    pairs.append((b"x" * (100 - len(value) + 1 - 8) + b"\nDevice:", value))
    expected = [
        *whole.log_likelihood(pairs[:3])[:, 0],
        Scorer(whole.lm, ByteTokenizer(), prefix=False).log_likelihood(pairs)[3, 0],
    ]
    assert found.samples["fda/log_likelihood"].tolist() == pytest.approx([float(each) for each in expected], rel=1e-6)


@pytest.mark.parametrize("end", ["", " ", "\n", " \n"])
def test_the_gain_is_that_of_one_continuation_also_behind_spaces(tmp_path, end):
    (tmp_path / "fda.jsonl").write_text(json.dumps({**ROWS[0], "text": f"A report\nDevice:{end}"}))
    scorer = Scorer(small_lm(vocab=257), ByteTokenizer())
    found = evaluate([Cloze("fda", prompt="v0", folder=str(tmp_path))], scorer, None)
    value = f"{end} x0 (Trade name)".encode()
    known, guessed = scorer.log_likelihood([(b"A report\nDevice:", value), (b"Device:", value)])[:, 0].tolist()
    assert found.metrics["fda_v0/gain"] == pytest.approx(known - guessed, abs=1e-5)


def test_what_contains_a_value():
    assert contains("It is a B (C) thing", "b (c)")
    assert not contains("It is a BCC thing", "b.c")
    assert question("text\nmore\nKey: \n") == "Key: \n"
    assert question("Key:") == "Key:"


def test_a_model_that_cannot_decode_is_refused():
    class Unable(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def init_state(self, *arguments):
            raise UserError("Mixer has no decoding state")

    scorer = Scorer(Unable(), ByteTokenizer())  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="fda reads through a decoding state: Mixer has no decoding state"):
        Cloze("fda").check(scorer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "key": "b"}, "row 2 has no value: a row has text, key, value"),
        ({"text": " ", "key": "b", "value": "c"}, "row 2 has no text"),
        ({"text": ["a"], "key": "b", "value": 3}, "row 2 has no text, value: a row has text, key, value"),
        ({"text": "a\ud800", "key": "b", "value": "c"}, "fda.jsonl:2: is not JSON"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(folder, row, message):
    (folder / "fda.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=message):
        Cloze("fda", folder=str(folder)).prepare(None)


def test_wrong_options_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no rows of swde: python -c .*'hazyresearch/based-swde-v2'"):
        Cloze("swde", folder=str(tmp_path)).row_files()
    with pytest.raises(UserError, match="unknown retrieval task 'fdaa'"):
        Cloze("fdaa")
    with pytest.raises(UserError, match=r"Cloze\.prompt must be v0, v1 or jrt, not v2"):
        Cloze("fda", prompt="v2")  # pyright: ignore[reportArgumentType]
