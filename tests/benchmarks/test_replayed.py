"""Calls replayed from a CUDA graph: refused without a GPU; on a GPU they give what the calls give."""

import pytest
import torch

from benchmarks import replayed
from seqarch.bench.timing import captured


def test_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["replayed.py"])
    with pytest.raises(SystemExit):
        replayed.main()
    assert capsys.readouterr().err == "replayed.py needs an NVIDIA GPU, and PyTorch sees none here\n"


@pytest.mark.gpu
def test_a_graph_repeats_a_call():
    tensors = replayed.draw(1, 300, 2, 64)
    found = []
    run = replayed.forward_backward(replayed.SELECTIONS["exact"], tensors)
    replay = captured(lambda: found.append(run()))
    replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found[-1], run(), strict=True))
