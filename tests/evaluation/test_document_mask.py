"""Evaluation with a document mask: documents are read alone, as in training, and only targets count."""

import itertools
import math

import pytest
import torch

from seqarch.data.datamodule import TextDataModule
from seqarch.data.packing import as_documents
from seqarch.data.prepare import prepare
from seqarch.data.tokenizers import ByteTokenizer
from seqarch.evaluation import Copying, LossByDomain, LossByPosition, Scorer, evaluate, losses
from seqarch.evaluation.bits_per_byte import BitsPerByte
from seqarch.evaluation.recall import frequent_bigrams
from seqarch.training import LanguageModel
from seqarch.training.callbacks.attention_entropy import layer_entropy
from tests.data.conftest import make_texts, write_jsonl
from tests.evaluation.test_scorer import small_lm

T = 150
EOS = ByteTokenizer.eos_id


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Two domains of short documents, `docs` and `code`."""
    root = tmp_path_factory.mktemp("short")
    for seed, name in enumerate(("docs", "code")):
        prepare([write_jsonl(root / f"{name}.jsonl", make_texts(60, seed))], root, name, "byte", holdout=0.3, workers=1)
    return root


@pytest.fixture(scope="module", params=["cut", "whole"])
def data(request, short):
    options = {"document_mask": True, "pack": request.param, "sequence_length": T, "eval_tokens": 12 * T}
    return TextDataModule(str(short), {"docs": 1.0}, ["code"], **options)


@pytest.fixture(scope="module")
def scorer():
    return Scorer(small_lm(vocab=257), ByteTokenizer(), batch_size=4)


def documents(each):
    """The tokens of each piece of a document in a set that has a target."""
    return [
        row[inside == number][None]
        for row, inside in zip(each.tokens, each.segments, strict=True)
        for number in inside[inside > 0].unique()
        if (inside == number).sum() > 1
    ]


def document_losses(lm, each):
    with torch.no_grad():
        return [lm(one[:, :-1], one[:, 1:], reduction="none")[0].double() for one in documents(each)]


def test_the_loss_is_the_mean_over_the_targets_of_documents_read_alone(scorer, data, monkeypatch):
    monkeypatch.setattr(losses, "frequent_bigrams", lambda data: torch.empty(0, dtype=torch.int64))
    scores = evaluate([LossByDomain()], scorer, data)
    for each in data.evaluation_sets():
        assert any(len(inside.unique()) > 1 for inside in each.segments)
        found = torch.cat(document_losses(scorer.lm, each))
        hits = []
        for one in documents(each):
            pairs = list(itertools.pairwise(one[0].tolist()))
            hits += [pair in pairs[:at] for at, pair in enumerate(pairs)]
        name = f"{each.role}/{each.domain}"
        assert scores.metrics[f"loss/{name}"] == pytest.approx(float(found.mean()), rel=1e-6)
        n_bytes = sum(int((one[0, 1:] != EOS).sum()) for one in documents(each))
        bits = float(found.sum()) / math.log(2) / n_bytes
        assert scores.metrics[f"bits_per_byte/{name}"] == pytest.approx(bits, rel=1e-6)
        assert evaluate([BitsPerByte()], scorer, data).metrics[f"bits_per_byte/{name}"] == pytest.approx(bits, rel=1e-6)
        assert scores.metrics[f"share_recallable/{name}"] == pytest.approx(sum(hits) / len(hits), rel=1e-9)
        recallable = found[torch.tensor(hits)].mean()
        assert scores.metrics[f"loss_recallable/{name}"] == pytest.approx(float(recallable), rel=1e-6)
        assert scores.samples[f"loss/{name}"].mean() == pytest.approx(scores.metrics[f"loss/{name}"], rel=1e-5)


def test_whole_hold_outs_and_training_have_the_same_loss(scorer, data):
    metrics = evaluate([LossByDomain(whole=True)], scorer, data).metrics
    module = LanguageModel(vocab_size=257)
    module.lm = scorer.lm
    for each in data.hold_outs():
        tokens, segments = (
            torch.stack([rows[row] for row in range(len(rows))]) for rows in (each.tokens, each.segments)
        )
        with torch.no_grad():
            loss = float(module.loss({"tokens": tokens, **as_documents(tokens, segments)}))
        assert metrics[f"loss/{each.role}/{each.domain}"] == pytest.approx(loss, rel=1e-5)


def test_positions_are_those_in_the_document(scorer, data):
    metrics = evaluate([LossByPosition([10, 60])], scorer, data).metrics
    for each in data.evaluation_sets():
        found = document_losses(scorer.lm, each)
        for start, stop in ((0, 10), (10, 60), (60, T)):
            expected = torch.cat([one[start:stop] for one in found]).mean()
            assert metrics[f"loss_by_position/{each.domain}/{start}-{stop}"] == pytest.approx(float(expected), rel=1e-6)


def test_rows_of_text_hold_no_end_of_a_document(data):
    task = Copying(sequences=200)
    task.prepare(data)
    assert EOS in data.evaluation_sets()[0].tokens
    assert EOS not in task.tokens


def test_bigrams_across_borders_are_not_counted_as_frequent(data):
    """A pair that begins with the end of a document is no pair of a document."""
    codes = frequent_bigrams(data)
    assert len(codes) > 50
    assert not (codes >> 32 == EOS).any()


def test_the_entropy_is_that_of_queries_in_their_document(scorer, data):
    each = data.evaluation_sets()[0]
    tokens, segments = each.tokens[:4, :-1], each.segments[:4, :-1]
    found = layer_entropy(scorer.lm, tokens, segments)
    alone = [
        layer_entropy(scorer.lm, one)
        for one in (
            row[inside == number][None]
            for row, inside in zip(tokens, segments, strict=True)
            for number in inside.unique()
        )
    ]
    sizes = torch.tensor([float((inside == number).sum()) for inside in segments for number in inside.unique()])
    for layer, heads in found.items():
        expected = sum(size * one[layer] for size, one in zip(sizes, alone, strict=True)) / sizes.sum()
        torch.testing.assert_close(heads, expected, rtol=1e-4, atol=1e-6)


def test_prompts_begin_like_the_documents_of_training(scorer, monkeypatch):
    assert scorer.prompt([5, 6]) == [EOS, 5, 6]
    monkeypatch.setattr(scorer.lm, "document_mask", True)
    assert scorer.prompt([5, 6]) == [5, 6]
    assert scorer.prompt([]) == [EOS]
