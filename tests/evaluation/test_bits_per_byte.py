"""Bits per byte: the formula by hand, tokens without bytes, and equal values for tokenizers that split otherwise."""

import math
import sys

import pytest
import torch

from seqarch.data.datamodule import TextDataModule
from seqarch.data.tokenizers import ByteTokenizer, MixtralTokenizer, load_tokenizer
from seqarch.errors import SeqarchWarning
from seqarch.evaluation import LossByDomain, Scorer, evaluate
from seqarch.evaluation.bits_per_byte import BitsPerByte, predicted_bytes
from tests.evaluation.test_scorer import small_lm


def test_the_losses_of_all_tokens_are_divided_by_the_bytes_of_their_text(shards):
    data = TextDataModule(str(shards), {"docs": 1.0}, ["code"], sequence_length=64, eval_tokens=8 * 64)
    data.setup("validate")
    scorer = Scorer(small_lm(vocab=257), ByteTokenizer(), batch_size=4)
    metrics = evaluate([BitsPerByte()], scorer, data).metrics
    for each in data.evaluation_sets():
        with torch.no_grad():
            nats = float(scorer.lm(each.tokens[:, :-1], each.tokens[:, 1:], reduction="none").double().sum())
        n_bytes = int((each.tokens[:, 1:] != 256).sum())
        found = metrics[f"bits_per_byte/{each.role}/{each.domain}"]
        assert found == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-6)
    assert len(metrics) == 2
    again = evaluate([LossByDomain()], scorer, data).metrics
    assert {tag: again[tag] for tag in metrics} == pytest.approx(metrics, rel=1e-6)


def test_without_the_tokenizers_package_losses_are_measured_and_bytes_said_to_be_missing(shards, monkeypatch):
    monkeypatch.setattr(TextDataModule, "tokenizer", MixtralTokenizer())
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    data = TextDataModule(str(shards), {"docs": 1.0}, ["code"], sequence_length=64, eval_tokens=8 * 64)
    with pytest.warns(SeqarchWarning, match="no bits_per_byte is measured: the tokenizer 'mixtral' needs"):
        metrics = evaluate([LossByDomain()], Scorer(small_lm(vocab=257), batch_size=4), data).metrics
    assert "loss/ood/code" in metrics
    assert not [tag for tag in metrics if tag.startswith("bits_per_byte")]


@pytest.mark.parametrize("text", ["two words", "naïve 漢字", "a  b\n\tc"])
def test_bytes_are_those_of_the_text_whatever_the_tokenizer(text):
    for name in ("byte", "mixtral"):
        tokenizer = load_tokenizer(name)
        ids = tokenizer.encode(text)
        first = len(tokenizer.decode(ids[:1]).encode())
        row = torch.tensor([*ids, tokenizer.eos_id])
        assert predicted_bytes(tokenizer, row) == len(text.encode()) - first
        assert predicted_bytes(tokenizer, torch.tensor([tokenizer.eos_id, *ids])) == len(text.encode())
        later = torch.tensor([*row.tolist(), *row.tolist(), *row.tolist()])
        assert predicted_bytes(tokenizer, later) == 3 * len(text.encode()) - first
