"""`RepeatGain`: what a model saves on text that it read before."""

from typing import Any

import pytest
import torch
from torch import nn

from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError
from seqarch.evaluation import RepeatGain, Scorer, evaluate

N, T = 16, 96


class Remembers(nn.Module):
    """A model whose loss is 1, and 0 where token and predecessor occurred at most `reach` tokens before."""

    def __init__(self, reach):
        super().__init__()
        self.reach = reach
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, inputs, targets, reduction, cu_seqlens=None):
        now = torch.stack([inputs, targets])
        loss = torch.ones(inputs.shape)
        for back in range(1, min(self.reach, inputs.shape[1] - 1) + 1):
            loss[:, back:][(now[..., back:] == now[..., :-back]).all(dim=0)] = 0
        return loss


class Numbers:
    """Held-out text without any repetition."""

    sequence_length = T

    def __init__(self, tokens):
        self.text = torch.arange(tokens)

    def evaluation_sets(self):
        return [self]


def gains(reach, tokens=400, **options):
    task = RepeatGain(**{"sequences": 3, "passage": N, "distances": [0, 20, 60]} | options)
    model: Any = Remembers(reach)
    data: Any = Numbers(tokens)
    return evaluate([task], Scorer(model, batch_size=4), data)


@pytest.mark.parametrize(
    ("reach", "expected"), [(N - 1, [0, 0, 0]), (N, [1, 0, 0]), (20 + N, [1, 1, 0]), (T, [1, 1, 1])]
)
def test_a_model_saves_as_far_as_it_remembers(reach, expected):
    scores = gains(reach)
    assert scores.metrics == {f"repeat_gain/{d}": value for d, value in zip([0, 20, 60], expected, strict=True)}
    assert {len(sample) for sample in scores.samples.values()} == {3}


def test_the_rows_span_the_hold_out_and_differ_in_the_first_passage_only():
    task = RepeatGain(3, N, [20])
    data: Any = Numbers(400)
    task.prepare(data)
    repeated, fresh = task.rows[20].chunk(2)
    assert torch.equal(repeated[:, N:], fresh[:, N:])
    assert torch.equal(repeated[:, :N], repeated[:, -N:])
    assert not torch.isin(fresh[:, :N], repeated).any()
    assert (repeated.min(), repeated.max()) == (0, 399)


def test_default_distances_stay_within_a_training_sequence(shards):
    data = TextDataModule(str(shards), {"docs": 1.0}, ["code"], sequence_length=1000, eval_tokens=4000)
    data.setup("validate")
    task = RepeatGain(2, 32)
    task.prepare(data)
    assert list(task.rows) == [256, 512]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequences": 0}, "RepeatGain.sequences must be at least 1"),
        ({"passage": 1}, "RepeatGain.passage must be at least 2"),
        ({"distances": [-1]}, "RepeatGain.distances must be at least 0"),
        ({"distances": []}, "RepeatGain.distances is empty"),
        ({"distances": None}, "data.sequence_length for RepeatGain.passage must be at least 288, not 96"),
        ({"tokens": 50}, "for RepeatGain.distances must be at least 92, not "),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UserError, match=message):
        gains(T, **options)
