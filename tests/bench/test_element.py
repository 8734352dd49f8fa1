"""`seqarch.bench.element` where there is no GPU: what it refuses, and that its checks can fail."""

import pytest
import torch

from seqarch.bench import element
from seqarch.kernels import top1_element_attention


def test_no_rows_without_correctness(monkeypatch):
    monkeypatch.setattr(element, "check_element", lambda: iter([True, False]))
    monkeypatch.setattr(element, "check_entropy", lambda: iter([True]))
    with pytest.raises(SystemExit, match="1 of 3 checks failed"):
        next(element.rows())


class Scaled(torch.autograd.Function):
    """The same output with a gradient 3 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return 1.03 * dx


KERNELS = {
    "right": (lambda o: o, True),
    "one query in 32 selects otherwise": (lambda o: torch.cat([o[:, :1] + 1, o[:, 1:]], dim=1), False),
    "gradients too large": (Scaled.apply, False),
    "not a number": (lambda o: o * torch.tensor(float("nan")), False),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_checks_can_fail(kernel, monkeypatch, capsys):
    change, held = KERNELS[kernel]

    def op(q, k, v, *, backend, **options):
        o = top1_element_attention(q, k, v, backend="reference", **options)
        return change(o) if backend == "triton" else o

    monkeypatch.setattr(element, "top1_element_attention", op)
    monkeypatch.setattr(element, "poison", lambda: None)
    tensors = [torch.randn(1, 32, 2, 16).requires_grad_() for _ in range(3)]
    assert element.compare(kernel, tensors) == held
    assert kernel in capsys.readouterr().out
