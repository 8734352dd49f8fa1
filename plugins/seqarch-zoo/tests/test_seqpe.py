"""With SeqPE as position encoding, seqarch's attention mixers keep the contract; it follows the digits of positions."""

from functools import partial
from typing import ClassVar

import pytest
import torch
from seqarch_zoo.seqpe import SeqPE

from seqarch.errors import UserError
from seqarch.mixers.attention import Attention
from seqarch.mixers.rwkv7 import RWKV7Shell
from seqarch.model.roles import is_decayed
from seqarch.testing import MixerSuite

SMALL = partial(SeqPE, width=8, layers=1, digits=2)


class TestAttention(MixerSuite):
    mixer = Attention
    options: ClassVar = [{"n_heads": 4, "n_kv_heads": 2, "position": partial(SMALL, apply="mul")}]


class TestShell(MixerSuite):
    mixer = RWKV7Shell
    options: ClassVar = [{"n_heads": 4, "position": SMALL}]


def test_the_encoding_is_that_of_the_digits():
    encoding = SeqPE(2, 1, 4, width=8, layers=2, digits=3)
    q, k = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 1, 4)
    of_q, of_k = encoding(q, k, torch.tensor([7, 130, 7]))
    torch.testing.assert_close(of_q[:, 0], of_q[:, 2])
    x = torch.cat((encoding.digit(torch.tensor([1, 3, 0])) + encoding.place.weight, encoding.last[0]))[None]
    for layer in encoding.layers:
        x = layer(x)
    expected = encoding.out(encoding.norm(x[0, -1])).view(3, 4)
    torch.testing.assert_close(torch.cat((of_q[0, 1], of_k[0, 1])), expected)


def test_encodings_start_at_the_scale_of_the_last_layer():
    """As with the authors' last LayerNorm: without it they start 16 times smaller, and "mul" makes all scores equal."""
    encoding = SeqPE(4, 4, 16, apply="mul")
    of_q, of_k = encoding(torch.ones(1, 50, 4, 16), torch.ones(1, 50, 4, 16), torch.arange(50))
    assert torch.cat((of_q, of_k)).std().item() == pytest.approx(0.02 * 64**0.5, rel=0.3)


def test_its_embeddings_are_not_decayed():
    decayed = {name for name, parameter in SeqPE(2, 1, 4, layers=1).named_parameters() if is_decayed(parameter)}
    assert decayed == {"out.weight", *(f"layers.0.{name}.weight" for name in ("qkv", "mix", "up", "down"))}


def test_more_tokens_than_digits_are_refused():
    with pytest.raises(UserError, match="digits for 100 positions, not 101"):
        Attention(32, 0, 2, n_heads=4, position=SMALL)(torch.randn(1, 101, 32))


def test_digits_beyond_64_bits_are_refused():
    positions = torch.arange(9)
    encoding = SeqPE(2, 1, 4, width=8, layers=1, digits=19)
    of_q, _ = encoding(torch.zeros(1, 9, 2, 4), torch.zeros(1, 9, 1, 4), positions)
    assert of_q.flatten(2).unique(dim=1).shape[1] == 9
    with pytest.raises(UserError, match=r"digits must lie in 1\.\.19, not 20"):
        SeqPE(2, 1, 4, digits=20)


@torch.no_grad()
def test_positions_with_more_digits_are_refused_in_pieces_too():
    mixer = Attention(32, 0, 2, n_heads=4, position=SMALL)
    state = mixer.init_state(1, 101, "cpu", torch.float32)
    mixer(torch.randn(1, 100, 32), state=state)
    with pytest.raises(UserError, match="digits for 100 positions, not 101"):
        mixer(torch.randn(1, 1, 32), state=state)


def test_documents_count_by_themselves():
    x, borders = torch.randn(1, 150, 32), torch.tensor([0, 90, 150], dtype=torch.int32)
    mixer = Attention(32, 0, 2, n_heads=4, position=SMALL)
    packed = mixer(x, cu_seqlens=borders)
    torch.testing.assert_close(packed, torch.cat([mixer(x[:, :90]), mixer(x[:, 90:])], dim=1))


def test_a_compiled_position_with_more_digits_fails():
    encoding = torch.compile(SMALL(1, 1, 4), backend="aot_eager", fullgraph=True)
    with pytest.raises(IndexError, match="out of range"):
        encoding(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), torch.tensor([100]))
