"""A model that sees later tokens is refused before its losses are measured."""

from pathlib import Path

import pytest
import torch
from torch import nn

from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError
from seqarch.evaluation import LossByDomain, Scorer, evaluate
from seqarch.evaluation.losses import check_causal
from seqarch.mixers.base import Mixer
from seqarch.model import GELUMLP, SequenceLM
from seqarch.model.lm import MixerFactory
from tests.evaluation.test_scorer import ROWS


class Mean(Mixer):
    """A mean of what a token sees, `ahead` tokens of it come after. Each weighs twice as much as the one before."""

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, ahead: int | None) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.value, self.ahead = nn.Linear(d_model, d_model, bias=False), ahead

    def forward(self, x):
        t = torch.arange(x.shape[1])
        seen = 2.0**t * (t <= t[:, None] + (len(t) if self.ahead is None else self.ahead))
        return self.value(3 * (seen / seen.sum(dim=1, keepdim=True)) @ x)


def model(*aheads: int | None, vocab: int = 31) -> SequenceLM:
    torch.manual_seed(0)
    mixers: dict[str, MixerFactory] = {
        f"layer_{index}": lambda d, i, n, ahead=ahead: Mean(d, i, n, ahead) for index, ahead in enumerate(aheads)
    }
    lm = SequenceLM(vocab, 16, len(aheads), mixers, list(mixers), feed_forward=GELUMLP)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return lm


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("aheads", [(None, None), (0, 1), (1, 0), (0, 2), (0, None)])
def test_any_layer_that_sees_later_tokens_is_found(batch_size: int, aheads: tuple[int | None, ...]):
    with pytest.raises(UserError, match=r"the model is not causal: later tokens change its losses by \d"):
        check_causal(Scorer(model(*aheads), batch_size=batch_size), ROWS[0])


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_causal_models_pass(batch_size: int):
    lm = model(0, 0)
    layouts = []
    lm.register_forward_pre_hook(lambda module, args: layouts.append([(each.shape, each.stride()) for each in args]))
    Scorer(lm, batch_size=batch_size).losses(ROWS)
    check_causal(Scorer(lm, batch_size=batch_size), ROWS[0])
    assert all(each == layouts[0] for each in layouts), "what is compiled meets one layout"
    check_causal(Scorer(lm, batch_size=batch_size), ROWS[0, :2])


def test_the_loss_by_domain_is_not_measured(shards: Path):
    data = TextDataModule(str(shards), {"docs": 1.0}, ["code"], sequence_length=16, eval_tokens=256)
    data.setup("validate")
    with pytest.raises(UserError, match="not causal"):
        evaluate([LossByDomain()], Scorer(model(None, vocab=257)), data)
