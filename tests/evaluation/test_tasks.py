"""The built-in tasks, on a small model and two small domains."""

import numpy as np
import pytest
import torch

from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError
from seqarch.evaluation import Copying, LossByDomain, LossByPosition, Scorer, evaluate, losses
from seqarch.evaluation.recall import bigrams
from tests.evaluation.test_recall import by_definition
from tests.evaluation.test_scorer import small_lm

T = 150


@pytest.fixture(scope="module")
def data(shards):
    data = TextDataModule(str(shards), {"docs": 1.0}, ["code"], sequence_length=T, eval_tokens=6 * T)
    data.setup("validate")
    return data


@pytest.fixture(scope="module")
def scorer():
    return Scorer(small_lm(vocab=257), batch_size=4)


def all_losses(scorer, data):
    """`{role/domain: [n, T]}` float64 by one forward pass each."""
    with torch.no_grad():
        return {
            f"{each.role}/{each.domain}": scorer.lm(each.tokens[:, :-1], each.tokens[:, 1:], reduction="none").double()
            for each in data.evaluation_sets()
        }


def test_loss_by_domain_and_its_split(scorer, data, monkeypatch):
    common = {(101, 32), (116, 104)}  # "e ", "th"
    monkeypatch.setattr(losses, "frequent_bigrams", lambda data: bigrams(torch.tensor(sorted(common))).flatten())
    metrics = evaluate([LossByDomain()], scorer, data).metrics
    tokens = {f"{each.role}/{each.domain}": each.tokens.tolist() for each in data.evaluation_sets()}
    for name, expected in all_losses(scorer, data).items():
        hits = torch.tensor(by_definition(tokens[name], common))
        assert 0.1 < hits.double().mean() < 0.9
        assert metrics[f"loss/{name}"] == pytest.approx(float(expected.mean()), rel=1e-6)
        assert metrics[f"loss_recallable/{name}"] == pytest.approx(float(expected[hits].mean()), rel=1e-6)
        assert metrics[f"loss_other/{name}"] == pytest.approx(float(expected[~hits].mean()), rel=1e-6)
        share = metrics[f"share_recallable/{name}"]
        assert share == pytest.approx(float(hits.double().mean()), rel=1e-12)
        whole = share * metrics[f"loss_recallable/{name}"] + (1 - share) * metrics[f"loss_other/{name}"]
        assert whole == pytest.approx(metrics[f"loss/{name}"], rel=1e-14)
    assert metrics["loss/in_domain"] == metrics["loss/in_domain/docs"]
    assert metrics["loss/ood"] == metrics["loss/ood/code"]


def test_a_part_without_tokens_has_no_loss(scorer, data, monkeypatch):
    every = torch.cat([bigrams(each.tokens).flatten() for each in data.evaluation_sets()]).unique()
    monkeypatch.setattr(losses, "frequent_bigrams", lambda data: every)
    metrics = evaluate([LossByDomain()], scorer, data).metrics
    assert metrics["share_recallable/ood/code"] == 0
    assert "loss_recallable/ood/code" not in metrics
    assert metrics["loss_other/ood/code"] == pytest.approx(metrics["loss/ood/code"], rel=1e-14)


def test_samples_are_the_losses_of_the_sequences_and_their_documents(scorer, data):
    scores = evaluate([LossByDomain()], scorer, data)
    code = data.evaluation_sets()[1]
    loss, document = scores.samples["loss/ood/code"], scores.samples["document/ood/code"]
    assert (loss.dtype, document.dtype) == (np.float32, np.int32)
    expected = all_losses(scorer, data)["ood/code"].mean(dim=1)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert document.tolist() == code.documents.tolist()


@pytest.mark.commands
def test_whole_hold_outs(data):
    task, scorer = LossByDomain(whole=True), Scorer(small_lm(vocab=257), batch_size=64)
    scores = evaluate([task], scorer, data)
    assert scores.samples == {}
    hold_out = data.hold_outs()[1]
    rows = torch.stack(list(hold_out.tokens))
    assert len(rows) > len(data.evaluation_sets()[1].tokens)
    expected = scorer.losses(rows).double().mean()
    assert scores.metrics["loss/ood/code"] == pytest.approx(float(expected), rel=1e-6)


def test_loss_by_position(scorer, data):
    metrics = evaluate([LossByPosition(), LossByDomain()], scorer, data).metrics
    for name, expected in all_losses(scorer, data).items():
        domain = name.partition("/")[2]
        ranges = {(0, 64): 64, (64, 128): 64, (128, 150): 22}
        for (start, stop), length in ranges.items():
            loss = metrics[f"loss_by_position/{domain}/{start}-{stop}"]
            assert loss == pytest.approx(float(expected[:, start:stop].mean()), rel=1e-6), length
        total = sum(metrics[f"loss_by_position/{domain}/{a}-{b}"] * n for (a, b), n in ranges.items()) / T
        assert total == pytest.approx(metrics[f"loss/{name}"], rel=1e-12)
    tags = [tag for tag in metrics if tag.startswith("loss_by_position/code")]
    assert len(tags) == 3
    own = evaluate([LossByPosition(edges=[10, T])], scorer, data).metrics
    assert [tag.rpartition("/")[2] for tag in own] == ["0-10", "10-150"] * 2


@pytest.mark.parametrize("edges", [[], [0, 8], [8, 8], [9, 8], ["a"], 5])
def test_wrong_edges_are_refused(edges):
    with pytest.raises(UserError, match=r"LossByPosition\.edges must be rising positions from 1 on"):
        LossByPosition(edges)


class Induction(torch.nn.Module):
    """Predicts what followed the last occurrence of the present token, with probability 1 - 1e-6 by logits of 20."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab = vocab
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens, targets, reduction, cu_seqlens=None):
        seen = (tokens[:, :, None] == tokens[:, None, :]) & torch.ones(tokens.shape[1], tokens.shape[1]).tril(-1).bool()
        last = (seen * torch.arange(1, tokens.shape[1] + 1)).amax(dim=2)
        guess = torch.where(last > 0, tokens.gather(1, last.clamp(max=tokens.shape[1] - 1)), -1)
        logits = torch.zeros(*tokens.shape, self.vocab + 1).scatter_(2, guess.clamp(min=0)[..., None], 20.0)
        logits[guess < 0] = 0
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction=reduction)


@pytest.mark.parametrize(("reading", "half"), [(20, 20), (256, (T + 1) // 2)])
def test_copying_compares_the_second_reading_with_the_first(scorer, data, reading, half):
    task = Copying(sequences=5, reading=reading)
    metrics = evaluate([task], scorer, data).metrics
    assert task.tokens.shape == (5, T + 1), "one shape for compiled models"
    assert torch.equal(task.tokens[:, :half], task.tokens[:, half : 2 * half])
    loss = scorer.losses(task.tokens).double()
    # prediction t is of token t + 1; the first token of a reading is left out
    assert metrics["copying/loss_first"] == pytest.approx(float(loss[:, : half - 1].mean()), rel=1e-6)
    assert metrics["copying/loss_again"] == pytest.approx(float(loss[:, half : 2 * half - 1].mean()), rel=1e-6)
    assert metrics["copying/gain"] == metrics["copying/loss_first"] - metrics["copying/loss_again"]


def test_a_model_that_copies_gains_and_one_without_context_does_not(data):
    distinct = Copying(sequences=3, reading=30)
    distinct.prepare(data)
    distinct._prepared_for = data
    distinct.tokens = torch.stack([torch.randperm(200)[:30] for _ in range(3)]).repeat(1, 6)[:, : T + 1]
    copies = Scorer(Induction(257))  # pyright: ignore[reportArgumentType]
    metrics = evaluate([distinct], copies, data).metrics
    assert metrics["copying/loss_again"] < 1e-4
    assert metrics["copying/gain"] > 5


def test_copying_draws_the_same_rows_each_time_and_no_global_random_number(data):
    first, second = Copying(), Copying()
    torch.manual_seed(4)
    before = torch.get_rng_state()
    first.prepare(data)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    second.prepare(data)
    assert torch.equal(first.tokens, second.tokens)


def test_wrong_options_of_copying_are_refused(shards):
    with pytest.raises(UserError, match=r"Copying\.sequences must be at least 1, not 0"):
        Copying(sequences=0)
    with pytest.raises(UserError, match=r"Copying\.reading must be at least 2, not 1"):
        Copying(reading=1)
    with pytest.raises(UserError, match=r"data\.sequence_length for Copying must be at least 3, not 2"):
        Copying().prepare(TextDataModule(str(shards), {"docs": 1.0}, [], sequence_length=2))
