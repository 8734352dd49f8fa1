"""Softmax attention: its own options, and the FlexAttention path evaluated on the CPU."""

import importlib

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from seqarch.errors import UserError
from seqarch.kernels import softmax_attention
from seqarch.kernels.top1_chunk.flex import flex_top1_chunk_attention
from tests.kernels import naive

flex = importlib.import_module("seqarch.kernels.softmax_attention")  # a function has its name


def test_a_window_of_one_is_the_identity_on_values():
    q, k, v = naive.draw(Tq=70)
    naive.assert_close(softmax_attention(q, k, v, window=1), v)


def test_a_window_longer_than_the_sequence_changes_nothing():
    q, k, v = naive.draw(Tq=70)
    naive.assert_close(softmax_attention(q, k, v, window=1000), softmax_attention(q, k, v))


@pytest.mark.parametrize(
    ("trains", "Tq", "Tk", "D", "window", "expected"),
    [
        *((False, 512, 1024, 64, None, [False, True]), (False, 511, 1024, 64, None, [False, False])),
        *((False, 1024, 1024, 64, None, [False, False]), (False, 512, 1024, 64, 100, [False, False])),
        *((False, 512, 1024, 96, None, [False, False]), (True, 2047, 2047, 64, None, [False, False])),
        *((True, 2048, 2048, 64, None, [True, True]), (True, 65536, 65536, 128, None, [False, False])),
    ],
)
def test_flash_attention_4_where_it_is_faster(monkeypatch, trains, Tq, Tk, D, window, expected):
    """In training; in passes over prompts only if they are compiled."""
    monkeypatch.setitem(flex.FOUND, "flash-attn-4", True)
    monkeypatch.setattr(flex, "is_hopper", lambda device: True)
    q, k = (torch.empty(1, 1, 1, 1, requires_grad=trains).expand(1, T, 2, D) for T in (Tq, Tk))

    def is_taken(q, k):
        return q.new_ones(()) if flex.prefers_fa4(q, k, k, 1.0, window, None, None) else q.new_zeros(())

    ways = is_taken, torch.compile(is_taken, backend="eager", fullgraph=True)
    assert [bool(way(q, k)) for way in ways] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes must have shape"),
        ({"backend": "flex"}, "CUDA"),
        ({"backend": "flux"}, "did you mean flex"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UserError, match=message):
        softmax_attention(*naive.draw(dtype=torch.float32), **options)


@pytest.mark.parametrize(("Tq", "Tk"), [(1, 1), (63, 63), (129, 129), (300, 300), (700, 700), (1, 300), (130, 700)])
@pytest.mark.parametrize("window", [None, 1, 128, 200, 1000])
def test_block_mask_covers_what_is_visible(Tq, Tk, window):
    first = flex.first_visible(Tq, Tk, window, None, torch.device("cpu"))
    _check_block_mask(first, Tk)


@pytest.mark.parametrize("borders", [[0, 700], [0, 1, 2, 699, 700], [0, 128, 256, 500, 500, 700], [0, 300, 600, 700]])
@pytest.mark.parametrize("window", [None, 150])
def test_block_mask_of_packed_documents(borders, window):
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    first = flex.first_visible(700, 700, window, cu_seqlens, torch.device("cpu"))
    i = torch.arange(700)
    start = torch.tensor([max(b for b in borders if b <= position) for position in i.tolist()])
    wanted = start if window is None else torch.maximum(start, i - window + 1)
    assert first.tolist() == wanted.tolist()
    _check_block_mask(first, 700)


def _check_block_mask(first, Tk):
    """Blocks listed as full are visible everywhere, blocks not listed nowhere, and none is listed twice."""
    Tq, size = first.shape[0], flex.MASK_BLOCK
    mask = flex.banded_block_mask(first, Tk)
    assert mask.full_kv_indices is not None
    assert mask.full_kv_num_blocks is not None
    i = torch.arange(Tk - Tq, Tk).unsqueeze(1)
    j = torch.arange(Tk).unsqueeze(0)
    visible = (j <= i) & (j >= first.unsqueeze(1))
    for row in range(-(-Tq // size)):
        partial = mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist()
        full = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist()
        assert len(set(partial + full)) == len(partial) + len(full)
        for column in range(-(-Tk // size)):
            block = visible[row * size : (row + 1) * size, column * size : (column + 1) * size]
            if column in full:
                assert block.all()
            elif column not in partial:
                assert not block.any()


@pytest.mark.parametrize("window", [None, 20])
def test_flex_masks_and_scores_mean_the_same(window):
    """FlexAttention without compilation evaluates the same mask and score functions densely."""
    q, k, v = (t.detach() for t in naive.draw(Tq=20, Tk=150))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    first = flex.first_visible(20, 150, window, None, q.device)
    o = flex_attention(
        *(t.transpose(1, 2) for t in (q, k, v)),
        score_mod=flex.alibi_score(slopes, 130),
        block_mask=flex.banded_block_mask(first, 150),
    )
    wanted = naive.softmax_attention(q, k, v, window=window, alibi_slopes=slopes)
    naive.assert_close(o.transpose(1, 2), wanted, 1e-6)


@pytest.mark.parametrize("chunks", [False, True])
def test_masks_of_a_graph_for_many_lengths_capture_what_has_a_layout(chunks):
    """FlexAttention on CUDA lowers captured symbols, not expressions of them such as `Tk - Tq`, and tensors of which it
    knows the layout: results of operators, not what the graph computes itself."""
    captured = []

    def backend(graph, _):
        calls = [node for node in graph.graph.nodes if "flex_attention" in str(node.target)]
        captured.extend(argument for node in calls for argument in node.args[-1])
        return graph

    def attend(q, k, v, cu_seqlens):
        if not chunks:
            return flex.flex_softmax_attention(q, k, v, 0.25, None, None, cu_seqlens)
        first = torch.zeros(q.shape[:3], dtype=torch.int32)
        return flex_top1_chunk_attention(q, k, v, first, 16, 0.25, cu_seqlens)

    torch.compiler.reset()
    q = torch.randn(1, 256, 2, 16)
    torch.compile(attend, backend=backend, dynamic=True)(q, q, q, torch.tensor([0, 100, 256], dtype=torch.int32))
    values = [each.meta["example_value"] for each in captured]
    assert captured
    assert all(value.node.expr.is_Symbol for value in values if isinstance(value, torch.SymInt))
    tensors = [each for each, value in zip(captured, values, strict=True) if isinstance(value, torch.Tensor)]
    assert {str(each.target) for each in tensors} == {"seqarch.laid_out.default"}
