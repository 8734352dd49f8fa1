"""Key/value caches: what they hold, what they refuse, and where they write."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import softmax_attention, top1_chunk_decode
from seqarch.kernels.flops import causal_keys, last_queries
from seqarch.mixers.cores import (
    AttentionCore,
    ChunkMeansState,
    KeyValueState,
    SoftmaxCore,
    Top1ChunkCore,
    Top1ElementCore,
)
from seqarch.testing.harness import Board, SharedPiece

CORES = [SoftmaxCore(), SoftmaxCore(3), Top1ElementCore(), Top1ChunkCore(4), Top1ChunkCore(4, "approx")]
CORES += [Top1ChunkCore(2, remote_chunks=2), Top1ChunkCore(2, "approx", remote_chunks=2)]
LIKE = {"device": "cpu", "dtype": torch.float64}


def heads(length: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, 2, 8, dtype=torch.float64)


@pytest.mark.parametrize("core", CORES, ids=str)
def test_generation_beyond_max_length_is_refused_and_harmless(core: AttentionCore) -> None:
    state = core.init_state(2, 5, 2, 8, **LIKE)
    core(heads(4), heads(4), heads(4), scale=1.0, state=state)
    with pytest.raises(UserError, match="init_state needs a max_length of 6 here, not 5"):
        core(heads(2), heads(2), heads(2), scale=1.0, state=state)
    core(heads(1), heads(1), heads(1), scale=1.0, state=state)
    assert state.length == 5


@pytest.mark.parametrize("core", CORES, ids=str)
def test_another_batch_or_dtype_than_the_states_is_refused(core: AttentionCore) -> None:
    state = core.init_state(2, 5, 2, 8, **LIKE)
    for k in (heads(1, batch=3), heads(1).float()):
        with pytest.raises(UserError, match=r"made for 2 rows of torch\.float64"):
            core(k, k, k, scale=1.0, state=state)


@pytest.mark.parametrize("core", CORES, ids=str)
def test_cores_have_no_parameters(core: AttentionCore) -> None:
    assert not list(core.parameters())


def test_decoding_writes_in_place() -> None:
    state = KeyValueState.empty(1, 8, 2, 8, **LIKE)
    buffer = state.keys.data_ptr()
    for _ in range(8):
        state.extend(heads(1, 1), heads(1, 1))
    assert state.keys.data_ptr() == buffer


def test_decoding_after_training_calls_keeps_their_graph() -> None:
    state = KeyValueState.empty(1, 8, 2, 8, **LIKE)
    k = heads(3, 1).requires_grad_()
    keys, _ = state.extend(k, k)
    loss = keys.square().sum()
    with torch.no_grad():
        state.extend(heads(2, 1), heads(2, 1))
        assert torch.equal(state.keys[:, :3], k)
    loss.backward()
    torch.testing.assert_close(k.grad, 2 * k)
    assert state.keys.shape[1] == 8


def test_a_window_keeps_its_last_keys_alone() -> None:
    core = SoftmaxCore(3)
    state = core.init_state(1, 100, 2, 8, **LIKE)
    k = heads(10, 1)
    core(k, k, k, scale=1.0, state=state)
    assert torch.equal(state.keys, k[:, 7:])
    assert state.keys.untyped_storage().nbytes() == 3 * 2 * 8 * 8


@pytest.mark.parametrize("pieces", [[1] * 11, [5, 6], [11], [3, 4, 4]])
def test_chunk_means_are_those_of_the_complete_chunks(pieces: list[int]) -> None:
    state = Top1ChunkCore(4, "approx").init_state(1, 11, 2, 8, **LIKE)
    assert isinstance(state, ChunkMeansState)
    k = heads(11, 1)
    for part in k.split(pieces, dim=1):
        state.extend(part, part)
    torch.testing.assert_close(state.complete_means()[0], k[:, :8].unflatten(1, (2, 4)).mean(2))


@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_top1_chunk_decodes_from_the_buffers_as_they_are(
    selection: Literal["exact", "approx"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token at a time without gradients reads the state's own buffers, and equals the whole sequence."""
    core = Top1ChunkCore(4, selection)
    state = core.init_state(2, 20, 2, 8, **LIKE)
    caches = []

    def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, **options: Any) -> Tensor:
        caches.append((k_cache.data_ptr(), v_cache.data_ptr(), *lengths.tolist()))
        return top1_chunk_decode(q, k_cache, v_cache, lengths, **options)

    monkeypatch.setattr("seqarch.kernels.top1_chunk_decode", decode)
    q, k, v = heads(18), heads(18), heads(18)
    whole = core(q, k, v, scale=1.0)
    buffers = state.keys.data_ptr(), state.values.data_ptr()
    start = core(q[:, :9], k[:, :9], v[:, :9], scale=1.0, state=state)
    rest = [core(*(t[:, i : i + 1] for t in (q, k, v)), scale=1.0, state=state) for i in range(9, 18)]
    torch.testing.assert_close(torch.cat([start, *rest], dim=1), whole)
    assert caches == [(*buffers, i, i) for i in range(10, 19)]
    last = (q[:, -1:].requires_grad_(), k[:, -1:], v[:, -1:])
    assert core(*last, scale=1.0, state=state).requires_grad
    assert len(caches) == 9


@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_several_remote_chunks_decode_and_have_an_entropy(selection: Literal["exact", "approx"]) -> None:
    """Token by token they equal the whole sequence."""
    core = Top1ChunkCore(4, selection, remote_chunks=3)
    state = core.init_state(2, 30, 2, 8, **LIKE)
    q, k, v = heads(30), heads(30), heads(30)
    pieces = [core(*(t[:, i : i + 1] for t in (q, k, v)), scale=1.0, state=state) for i in range(30)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), core(q, k, v, scale=1.0))
    one, many = (Top1ChunkCore(4, selection, remote_chunks=n).entropy(q, k, scale=1.0) for n in (1, 7))
    full = SoftmaxCore().entropy(q, k, scale=1.0)
    torch.testing.assert_close(many, full)
    torch.testing.assert_close(one[:, :8], full[:, :8])
    assert not torch.allclose(core.entropy(q, k, scale=1.0), one)


@pytest.mark.parametrize(("processes", "length"), [(2, 6), (3, 4), (4, 8), (4, 5), (4, 1)])
def test_processes_share_the_work_of_attention(processes: int, length: int) -> None:
    """Halves of pieces are equally long where the pieces are even."""
    whole = [heads(processes * length) for _ in range(3)]
    board, work = Board(processes), [0] * processes

    def read(rank: int) -> Tensor:
        def core(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: None) -> Tensor:
            work[rank] += last_queries(causal_keys, q.shape, k.shape)
            return softmax_attention(q, k, v)

        piece = SharedPiece(rank, processes, length, board=board)
        q, k, v = map(piece.cut, whole)
        return piece.attend(core, q, k, v, None, None)

    torch.testing.assert_close(torch.cat(board.run(read), dim=1), softmax_attention(*whole))
    assert sum(work) == last_queries(causal_keys, whole[0].shape, whole[1].shape)
    assert length % 2 or len({*work}) == 1
