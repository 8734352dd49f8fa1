"""Models with mixers of this package, or with repeated blocks, generate what a full pass over the text gives."""

from functools import partial
from typing import Any

import pytest
import torch
from parameters import moved
from seqarch_zoo.gated_associative import GatedAssociative
from seqarch_zoo.gated_attention import GatedAttention
from seqarch_zoo.infllm2 import InfLLM2
from seqarch_zoo.kimi_delta_attention import KimiDeltaAttention
from seqarch_zoo.mamba3 import Mamba3
from seqarch_zoo.mesa_net import MesaNet
from seqarch_zoo.mlstm import MLSTM
from seqarch_zoo.n_gram import NGram
from seqarch_zoo.s4d import DLR, S4D
from seqarch_zoo.seqpe import SeqPE
from seqarch_zoo.seqpe_attention import SeqPEAttention
from seqarch_zoo.slstm import SLSTM
from seqarch_zoo.ttt_linear import TTTLinear
from seqarch_zoo.ttt_mlp import TTTMLP

from seqarch.errors import UserError
from seqarch.model import SequenceLM, generate
from seqarch.model.decoder import is_static

GATED: Any = GatedAttention
INFLLM2: Any = InfLLM2
SEQPE: Any = SeqPEAttention
TTT_LINEAR: Any = TTTLinear
TTT_MLP: Any = TTTMLP
POSITION = partial(SeqPE, width=8, layers=1, digits=2)
MIXERS: dict[str, Any] = {
    "DLR": partial(DLR, d_state=4),
    "GatedAssociative": partial(GatedAssociative, n_slots=8),
    "GatedAttention": partial(GATED, n_heads=2, position=POSITION),
    "InfLLM2": partial(INFLLM2, n_heads=2, chunk_size=4, selected_chunks=2, local_chunks=1),
    "KimiDeltaAttention": partial(KimiDeltaAttention, n_heads=2),
    "MLSTM": partial(MLSTM, n_heads=2),
    "Mamba3": partial(Mamba3, d_state=8, head_dim=8, rank=2),
    "MesaNet": partial(MesaNet, n_heads=2, cg_steps=5),
    "NGram": NGram,
    "S4D": partial(S4D, d_state=4),
    "SLSTM": partial(SLSTM, n_heads=2),
    "SeqPEAttention": partial(SEQPE, n_heads=2, width=8, layers=1),
    "TTTLinear": partial(TTT_LINEAR, n_heads=2, mini_batch=4),
    "TTTMLP": partial(TTT_MLP, n_heads=2, mini_batch=4),
}


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_generated_text(name):
    torch.manual_seed(0)
    lm = moved(SequenceLM(31, 16, 2, {"mixer": MIXERS[name]}, loops=2).double())
    tokens = torch.randint(0, 31, (2, 5))
    drawn = generate(lm, tokens, 7, temperature=0)
    for _ in range(7):
        tokens = torch.cat((tokens, lm(tokens)[:, -1:].argmax(dim=-1)), dim=1)
    assert [row.tolist() for row in drawn] == tokens[:, 5:].tolist()
    assert is_static(lm) == (not name.startswith(("TTT", "InfLLM2")))  # their states count tokens in Python


@pytest.mark.parametrize("name", [*MIXERS, "KimiDeltaAttention without a convolution"])
@torch.no_grad()
def test_sequences_that_are_none_are_refused(name):
    """An empty sequence, also after others; packed documents in two rows; borders of another type. No rows pass."""
    mixer = MIXERS[name](16, 0, 2) if name in MIXERS else KimiDeltaAttention(16, 0, 2, n_heads=2, conv=False)
    x, state = torch.randn(2, 9, 16), mixer.init_state(2, 9, "cpu", torch.float32)

    def run(x: torch.Tensor, **options: Any) -> torch.Tensor:
        tokens = torch.zeros(x.shape[:2], dtype=torch.int64)
        return mixer(x, **options, **({"tokens": tokens} if name == "NGram" else {}))

    assert run(x[:0]).shape == (0, 9, 16)
    run(x[:, :4], state=state)
    for empty in ({}, {"state": state}):
        with pytest.raises(UserError, match=r"T must be at least 1|Tq must be at least 1"):
            run(x[:, :0], **empty)
    for rows, borders, words in ((2, torch.tensor([0, 9]).int(), "B = 1"), (1, torch.tensor([0, 9]), "int32")):
        with pytest.raises(UserError, match=words):
            run(x[:rows], cu_seqlens=borders)
