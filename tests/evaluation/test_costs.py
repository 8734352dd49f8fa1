"""Entropy and speed of decoding as results of `seqarch eval`."""

import itertools
from functools import partial

import pytest
import torch

from seqarch.data.datamodule import TextDataModule
from seqarch.data.tokenizers import ByteTokenizer
from seqarch.errors import UserError
from seqarch.evaluation import Scorer, decoding_speed, evaluate
from seqarch.evaluation.decoding_speed import DecodingSpeed
from seqarch.evaluation.entropy import Entropy, layer_entropy
from seqarch.mixers.attention import Attention
from seqarch.mixers.base import Mixer
from seqarch.mixers.delta_net import DeltaNet
from seqarch.model import SequenceLM


class Last(Mixer):
    """Passes each token on."""

    def forward(self, x):
        return x


def scorer_of(**mixers):
    made = {name: partial(kind, **options) for name, (kind, options) in mixers.items()}
    return Scorer(SequenceLM(257, 32, 4, made, [*mixers]), ByteTokenizer(), batch_size=4)


ATTENTION, DELTA = (Attention, {"n_heads": 2}), (DeltaNet, {"n_heads": 2})


def test_the_entropy_of_a_hybrid_is_the_mean_over_the_layers_of_each_kind(shards):
    data = TextDataModule(str(shards), {"docs": 1.0}, ["code"], sequence_length=64, eval_tokens=8 * 64)
    scorer = scorer_of(a=ATTENTION, b=DELTA)
    scores = evaluate([Entropy(sequences=3, length=40)], scorer, data).metrics
    layers = layer_entropy(scorer.lm, data.evaluation_sets()[0].tokens[:3, :40])
    assert scores == pytest.approx(
        {
            "entropy/attention": float(torch.stack([layers[0], layers[2]]).mean()),
            "entropy/implied": float(torch.stack([layers[1], layers[3]]).mean()),
        }
    )


def test_a_model_without_attention_weights_is_refused():
    with pytest.raises(UserError, match="no mixer of this model has attention weights"):
        Entropy().check(scorer_of(a=(Last, {})))


def test_speed_is_that_of_the_median_step_after_the_first_ones(monkeypatch):
    """Reading the prompt takes 100 seconds, warm-up steps 7, later steps 0.5, one of them 30."""
    steps = [100.0, *[7.0] * decoding_speed.WARM_UP, *[0.5] * 5, 30.0, *[0.5] * 2]
    clock = itertools.accumulate(steps)
    monkeypatch.setattr(decoding_speed.time, "perf_counter", lambda: next(clock))
    scores = DecodingSpeed(prompt=5, new=8).score(scorer_of(a=ATTENTION))
    keys_and_values = 4 * 2 * 5 * 32  # of 4 layers after 5 tokens of width 32
    assert scores.metrics == {"decoding/tokens_per_second": 2.0, "decoding/state_elements": keys_and_values}
    assert "machine" in DecodingSpeed().settings
