"""Long documents: whole ones, read in pieces of bounded memory, with the losses of one pass."""

import json
import math

import pytest
import torch

from seqarch.data.datamodule import TextDataModule
from seqarch.data.prepare import prepare
from seqarch.data.shards import Domain
from seqarch.data.tokenizers import ByteTokenizer
from seqarch.errors import UserError
from seqarch.evaluation import Scorer, evaluate
from seqarch.evaluation.long_documents import LongDocuments
from seqarch.evaluation.results import evaluate_into
from tests.evaluation.test_scorer import small_lm
from tests.model.test_generation import COMPOSED, build, tokens

EOS = 256
LENGTHS = (300, 90, 205, 199, 200, 450)
TEXTS = ["".join(chr(97 + (i * i + n) % 26) for i in range(length)) for n, length in enumerate(LENGTHS)]
LONG = [text for text in TEXTS if len(text) + 1 >= 201]
"""As many tokens as the last edge, the end of the document included."""
EDGES = [50, 201]


@pytest.fixture
def domains(tmp_path, monkeypatch):
    """A folder with the domain `books`, whose shards are shorter than its documents."""
    monkeypatch.setattr("seqarch.data.assemble.CHUNK_TOKENS", 128)
    source = tmp_path / "books.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare([source], tmp_path / "shards", "books", "byte", holdout=1)
    return tmp_path / "shards"


def scorer(**options):
    return Scorer(small_lm(vocab=257), ByteTokenizer(), **options)


def of_one_pass(model, text, n=201):
    """The losses of the first `n` tokens of a text that follows EOS."""
    tokens = torch.tensor([[EOS, *text.encode(), EOS]])[:, : n + 1]
    with torch.no_grad():
        return model.lm(tokens[:, :-1], tokens[:, 1:], reduction="none")[0].double()


@pytest.mark.parametrize("max_tokens", [1000, 201, 64])
def test_losses_are_those_of_one_pass_over_whole_documents(domains, max_tokens):
    model, seen = scorer(max_tokens=max_tokens), []
    model.lm.register_forward_pre_hook(lambda module, args: seen.append(args[0].numel()))
    scores = evaluate([LongDocuments(EDGES, folder=str(domains))], model, None)
    assert max(seen) <= max_tokens
    losses = torch.stack([of_one_pass(model, text) for text in LONG])
    for between, mean in (("0-50", losses[:, :50].mean(1)), ("50-201", losses[:, 50:].mean(1))):
        found = torch.from_numpy(scores.samples[f"loss_by_position/books/{between}"]).double()
        torch.testing.assert_close(found, mean, rtol=1e-5, atol=0)
        assert scores.metrics[f"loss_by_position/books/{between}"] == pytest.approx(float(mean.mean()), rel=1e-5)


def test_rows_and_the_hold_outs_of_the_run_are_read_alike(domains, tmp_path):
    model, rows = scorer(), tmp_path / "rows"
    rows.mkdir()
    (rows / "long.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepared, texts = (evaluate([LongDocuments(EDGES, folder=str(each))], model, None) for each in (domains, rows))
    assert list(texts.metrics) == ["loss_by_position/long/0-50", "loss_by_position/long/50-201"]
    assert list(texts.metrics.values()) == list(prepared.metrics.values())
    run = TextDataModule(str(domains), {"books": 1.0}, sequence_length=64)
    run.hold_outs = lambda: [type("HoldOut", (), {"tokens": Domain(domains / "books").sequences("holdout", 65)})]  # pyright: ignore
    assert evaluate([LongDocuments(EDGES)], model, run).metrics == prepared.metrics
    first = evaluate([LongDocuments(EDGES, documents=1, folder=str(rows))], model, None)
    assert [len(each) for each in first.samples.values()] == [1, 1]


def test_an_oracle_loses_nothing_and_a_random_model_as_much_as_a_guess(domains):
    class Knows(torch.nn.Linear):
        document_mask = False

        def forward(self, tokens, targets, *, state, reduction):
            return torch.zeros(targets.shape)

        def init_state(self, *arguments):
            return None

    task = LongDocuments(EDGES, folder=str(domains))
    assert set(evaluate([task], Scorer(Knows(1, 1), ByteTokenizer()), None).metrics.values()) == {0.0}  # pyright: ignore
    for loss in evaluate([task], scorer(), None).metrics.values():
        assert loss == pytest.approx(math.log(257), abs=0.1)


@pytest.mark.parametrize("name", COMPOSED)
def test_pieces_are_one_pass(name):
    """To the rounding of float64."""
    lm = build(name)
    rows = tokens(2, 42)
    whole = Scorer(lm).measure(rows, lambda losses, tokens: losses)
    pieces = Scorer(lm, max_tokens=7).measure(rows, lambda losses, tokens: losses, pieces=True)
    torch.testing.assert_close(pieces, whole, rtol=1e-10, atol=1e-10)


def test_what_cannot_be_measured_is_refused(domains, tmp_path):
    task, model = LongDocuments(EDGES, folder=str(domains)), scorer()
    model.lm.positions = torch.nn.Embedding(100, 16)
    with pytest.raises(UserError, match=r"LongDocuments .* learned_positions is 100: a sequence of 201"):
        task.check(model)
    with pytest.raises(UserError, match=r"no document of books has 9,000 tokens: change --lengths or --rows"):
        evaluate([LongDocuments([9000], folder=str(domains))], scorer(), None)
    for wrong in ({"txt": TEXTS[0]}, {"text": 3}, {"text": None}):
        (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ({"text": TEXTS[0]}, wrong)))
        with pytest.raises(UserError, match=r"long\.jsonl: row 2 has no text: a row has text"):
            evaluate([LongDocuments(EDGES, folder=str(tmp_path))], scorer(), None)
    trained_on = {Domain(domains / "books").manifest.sources[0].sha256: "books.jsonl of web"}
    with pytest.raises(UserError, match=r"books/books\.jsonl is books\.jsonl of web, which the model was trained on"):
        evaluate_into(tmp_path / "out", 1, [task], scorer(), None, {}, trained_on)
    model = scorer()
    assert model.tokenizer is not None
    model.tokenizer.name = "other"
    with pytest.raises(UserError, match=r"books has the tokenizer byte, but the model other"):
        task.check(model)
    with pytest.raises(UserError, match=r"LongDocuments\.edges must be rising positions"):
        LongDocuments([9, 8])
