"""SeqPEAttention keeps the contract; its scores and losses are the paper's, and the losses train its encoder."""

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from parameters import moved
from seqarch_zoo.seqpe import SeqPE
from seqarch_zoo.seqpe_attention import (
    CANDIDATES,
    NEAR,
    ROWS,
    SeqPEAttention,
    contrastive_loss,
    distillation_loss,
    draw_candidates,
)

from seqarch.errors import UserError
from seqarch.model import SequenceLM
from seqarch.testing import MixerSuite
from seqarch.testing.harness import Inputs

SMALL: Any = {"n_heads": 4, "width": 8, "layers": 1, "digits": 3, "max_position": 600}


class TestSeqPEAttention(MixerSuite):
    mixer = SeqPEAttention
    options: ClassVar = [{**SMALL, "n_kv_heads": 2}, {**SMALL, "apply": "mul"}]

    def inputs(self, *args, **options):
        return Inputs(super().inputs(*args, **options).x)  # the layer with the encoder takes none from others


class TestLaterLayer(MixerSuite):
    mixer = SeqPEAttention
    options: ClassVar = [SMALL]

    def build(self, configuration, dtype=torch.float64, layer_idx=1):
        mixer = super().build(configuration, dtype, layer_idx)
        if layer_idx:
            mixer.connect([mixer])
        return mixer


@torch.no_grad()
def test_scores_have_the_product_of_encodings_added():
    torch.manual_seed(0)
    mixer = moved(SeqPEAttention(32, 0, 2, **SMALL).double())
    assert mixer.encoder is not None
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    q, k, v = (t.transpose(1, 2) for t in mixer.project(x))
    of_q, of_k = mixer.encoder.of_heads(mixer.encoder.encode(torch.arange(20))).transpose(0, 1).chunk(2)
    scores = (q @ k.mT + of_q @ of_k.mT) / 8**0.5
    weights = scores.masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    torch.testing.assert_close(mixer(x), mixer.out((weights @ v).transpose(1, 2).flatten(2)))


def test_candidates_are_near_each_other_or_far_or_a_digit_away():
    torch.manual_seed(0)
    drawn = [draw_candidates(5_000, 4, torch.device("cpu")) for _ in range(20)]
    pivots, candidates = (torch.cat(each) for each in zip(*drawn, strict=True))
    assert (candidates >= 0).all()
    assert (candidates < 5_000).all()
    near = candidates.amax(1) - candidates.amin(1) < NEAR
    assert near.float().mean().item() == pytest.approx(0.6, abs=0.1)
    assert all(len(set(row.tolist())) == CANDIDATES for row in candidates[near])
    hard, places = candidates[~near, : CANDIDATES // 4, None], 10 ** torch.arange(4)
    others = (hard // places % 10 != pivots[~near, None, None] // places % 10).sum(-1)
    assert (others <= 1).float().mean() > 0.8  # a digit that would be too large is drawn anew from everywhere


def encoder() -> SeqPE:
    torch.manual_seed(0)
    made = SeqPE(4, 4, 8, width=8, layers=1, digits=3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.double()


def test_the_contrastive_loss_is_that_of_the_nearest_position():
    made = encoder()
    torch.manual_seed(1)
    found = contrastive_loss(made, 600)
    torch.manual_seed(1)
    pivots, candidates = draw_candidates(600, 3, torch.device("cpu"))
    terms = []
    for pivot, row in zip(pivots.tolist(), candidates.tolist(), strict=True):
        others = list(dict.fromkeys(each for each in row if each != pivot))
        products = made.encode(torch.tensor(others)) @ made.encode(torch.tensor([pivot]))[0]
        nearest = min(range(len(others)), key=lambda index: abs(others[index] - pivot))
        terms.append(products.logsumexp(0) - products[nearest])
    assert len(terms) == ROWS
    torch.testing.assert_close(found, torch.stack(terms).mean())


def test_the_distillation_teaches_shifted_positions_only(monkeypatch):
    made, seen = encoder(), []
    encode = made.encode
    monkeypatch.setattr(made, "encode", lambda positions: seen.append(positions) or encode(positions))
    loss = distillation_loss(made, 600, 40)
    taught, shifted = (positions.view(ROWS, -1) for positions in seen)
    assert taught.max() < 40
    shifts = shifted - taught
    assert (shifts == shifts[:, :1]).all()
    assert shifts.min() >= 10
    assert shifted.max() < 600
    teacher, student = (
        encode(positions.flatten()).view(ROWS, -1, 4, 2).transpose(1, 2) for positions in (taught, shifted)
    )
    logs = [(parts @ parts.mT).log_softmax(-1) for parts in (teacher.detach(), student)]
    both = [F.kl_div(logs[n], logs[1 - n], log_target=True, reduction="none").mean() for n in (0, 1)]
    expected = both[0] + both[1]
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(each, made.place.weight)[0] for each in (loss, expected))
    torch.testing.assert_close(ours, theirs)


def test_the_losses_train_the_encoder():
    torch.manual_seed(0)
    made = SeqPE(4, 4, 8, width=16, layers=1, digits=3)
    optimizer = torch.optim.Adam(made.parameters(), lr=0.01)
    found = []
    for _ in range(60):
        loss = contrastive_loss(made, 1000)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert sum(found[-10:]) < 0.8 * sum(found[:10])


def test_a_model_has_one_encoder_and_its_losses_once():
    torch.manual_seed(0)
    lm = SequenceLM(11, 32, 3, {"a": partial(SeqPEAttention, **SMALL)})
    assert [name for name, _ in lm.named_parameters() if "encoder.digit" in name] == [
        "blocks.0.mixer.encoder.digit.weight"
    ]
    tokens = torch.randint(0, 11, (2, 21))
    loss = lm(tokens[:, :-1], tokens[:, 1:], added=1.0)
    assert lm.added.keys() == {"contrast", "distil"}
    loss.backward()
    assert all(parameter.grad is not None for parameter in lm.parameters())
    state = lm.double().init_state(2, 20, "cpu", torch.float64)
    pieces = torch.cat([lm(piece, state=state) for piece in tokens[:, :-1].split(7, dim=1)], dim=1)
    torch.testing.assert_close(pieces, lm(tokens[:, :-1]))


def test_a_range_below_twice_the_sequence_is_refused():
    mixer = SeqPEAttention(32, 0, 2, **SMALL)
    with pytest.raises(UserError, match="max_position must be at least 602, twice the sequence: 600"):
        mixer(torch.randn(1, 301, 32), losses={})
    with pytest.raises(UserError, match="max_position=5000 has more than digits=3 digits"):
        SeqPEAttention(32, 0, 2, **{**SMALL, "max_position": 5000})
