"""What scripts time or count of models, our own and published ones."""

import functools
import sys
import types
from pathlib import Path

import pytest
import torch

from benchmarks.fla_generation import time_model
from benchmarks.published_step import shape_of
from benchmarks.tables.cluster import BF16, FLOAT32, bytes_of_a_piece, bytes_of_halves
from seqarch.mixers import pieces
from seqarch.mixers.registry import load_mixer
from seqarch.model import SequenceLM

ROOT = Path(__file__).parents[2]


class Counter(torch.nn.Module):
    """A model whose cache is the number of tokens that it has read."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.calls = []

    def forward(self, input_ids, past_key_values, use_cache, logits_to_keep):
        self.calls.append((*input_ids.shape, past_key_values or 0))
        logits = self.weight.new_zeros(len(input_ids), logits_to_keep, 32000)
        seen = (past_key_values or 0) + input_ids.shape[1]
        return types.SimpleNamespace(logits=logits, past_key_values=seen)


def test_prompts_are_read_in_pieces_and_steps_go_on_from_them():
    model = Counter()
    row = time_model(model, prompt=20000, new=16, batch_size=2, steps=4)
    pieces = [(2, 8192, 0), (2, 8192, 8192), (2, 3616, 16384)]
    assert model.calls == [*pieces, *pieces, *((2, 1, 20000 + step) for step in range(5 + 4))]
    assert (row["batch_size"], row["prompt"], row["new"]) == (2, 20000, 16)
    assert row["prefill_tokens_per_s"] == 2 * 20000 / row["prefill_s"]


def test_published_models_get_the_shape_of_the_recipe():
    assert shape_of(
        str(ROOT / "recipes/transformer_pp_110m.yaml"), {"data": {"sequence_length": 64, "micro_batch_size": 3}}
    ) == {"batch": [3, 64], "vocab_size": 32000, "layers": 12, "heads": 12, "width": 768, "hidden": 2048}


@pytest.mark.parametrize(
    ("mixer", "options", "itemsize"),
    [
        ("Attention", {"n_heads": 2}, BF16),
        ("Top1Chunk", {"n_heads": 2, "chunk_size": 4}, BF16),
        ("Mamba2", {"head_dim": 8, "d_state": 4}, FLOAT32),
    ],
)
def test_a_layer_gathers_as_many_numbers_as_the_table_counts(mixer, options, itemsize, monkeypatch):
    gathered, exchanged = [], []

    def all_pieces(x, group, size):
        gathered.append(x.numel())
        return x.expand(size, *x.shape)

    def exchange(x, group, given, taken):
        exchanged.append(x.numel())
        return x.new_zeros(sum(taken))

    monkeypatch.setattr(pieces, "all_pieces", all_pieces)
    monkeypatch.setattr(pieces, "exchange", exchange)
    lm = SequenceLM(50, 32, 1, {"mixer": functools.partial(load_mixer(mixer), **options)})
    lm(torch.zeros(1, 12, dtype=torch.int64), piece=pieces.Piece(1, 2, 12))
    assert sum(gathered) * itemsize == bytes_of_a_piece(lm, 12)
    assert sum(exchanged) * itemsize == bytes_of_halves(lm, 12) or mixer == "Mamba2"  # of the convolution, left out


@pytest.fixture
def interface(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks/torch_flash_attn")
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from flash_attn import flash_attn_interface  # pyright: ignore[reportMissingImports]

    yield flash_attn_interface
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        sys.modules.pop(name, None)


def test_the_stand_in_for_flash_attn_fits_the_operators_of_pytorch(interface):
    q, k, v = (torch.empty(96, 3, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    borders = torch.empty(4, dtype=torch.int64, device="meta")
    packed = {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": 64, "max_seqlen_k": 64}
    options = {"dropout_p": 0.0, "softmax_scale": 0.125, "causal": True}
    out, lse, *_ = interface._flash_attn_varlen_forward(q=q, k=k, v=v, **packed, **options)
    assert out.shape == q.shape
    assert lse.shape == (3, 96)
    gradients = {name: torch.empty_like(q) for name in ("dq", "dk", "dv")}
    given = {"dout": out, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
    interface._flash_attn_varlen_backward(**given, **gradients, **packed, **options, window_size_left=-1)
