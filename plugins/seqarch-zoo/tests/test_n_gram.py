"""NGram keeps the contract and equals the authors' masks; in a model it sees the tokens of its own documents."""

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from seqarch_zoo.n_gram import NGram

from seqarch.errors import UserError
from seqarch.mixers.attention import Attention
from seqarch.model import SequenceLM
from seqarch.testing import MixerSuite


class TestNGram(MixerSuite):
    mixer = NGram
    options: ClassVar = [{}, {"n": 2}]


@pytest.mark.parametrize("n", [1, 2, 3])
@torch.no_grad()
def test_equals_the_authors_layer(n):
    """github.com/berlino/seq_icl, src/models/sequence/rnn/ngram.py, induction_head: masks over all pairs."""
    torch.manual_seed(0)
    mixer, x = NGram(8, 0, 2, n=n).double(), torch.randn(2, 60, 8, dtype=torch.float64)
    tokens = torch.randint(0, 3, (2, 60))
    causal = torch.ones(60, 60, dtype=torch.bool).tril(-1)
    match = (tokens[:, None] == tokens[:, :, None]) & causal
    matches = [F.pad(match, (back, -back, back, -back)) for back in range(n)]
    weights = (F.pad(torch.stack(matches).all(0), (1, -1)) & causal).double()
    assert weights.any()
    means = weights / weights.sum(-1, keepdim=True).clamp_min(1) @ x
    torch.testing.assert_close(mixer(x, tokens=tokens), mixer.earlier(means) + mixer.own(x))


def test_what_follows_the_last_token_is_found():
    mixer, x = NGram(4, 0, 2), torch.eye(6)[None, :, :4]
    found = mixer._means(x, x.unsqueeze(2), torch.tensor([5, 1, 7, 5, 2, 5])[None, :, None], 0)
    torch.testing.assert_close(found[0, 3], x[0, 1])  # what followed the first 5
    torch.testing.assert_close(found[0, 5], (x[0, 1] + x[0, 4]) / 2)
    assert not found[0, :3].any()


@torch.no_grad()
def test_a_model_gives_it_its_tokens_in_every_loop_and_document():
    torch.manual_seed(0)
    attention: Any = Attention
    mixers: Any = {"attention": partial(attention, n_heads=2, position="none"), "n_gram": partial(NGram, n=2)}
    lm = SequenceLM(5, 16, 2, mixers, pattern=["attention", "n_gram"], loops=2).double()
    tokens = torch.randint(0, 5, (1, 40))
    packed = lm(tokens, cu_seqlens=torch.tensor([0, 17, 40], dtype=torch.int32))
    torch.testing.assert_close(packed, torch.cat([lm(tokens[:, :17]), lm(tokens[:, 17:])], dim=1))
    state = lm.init_state(1, 40, "cpu", torch.float64)
    pieces = torch.cat([lm(piece, state=state) for piece in tokens.split(9, dim=1)], dim=1)
    torch.testing.assert_close(pieces, lm(tokens))


def test_without_tokens_it_is_refused():
    with pytest.raises(UserError, match="NGram needs the ids of the tokens"):
        NGram(4, 0, 2)(torch.randn(1, 3, 4))
