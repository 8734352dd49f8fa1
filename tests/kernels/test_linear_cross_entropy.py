"""Linear cross-entropy against the plain one on all logits."""

import pytest
import torch
import torch.nn.functional as F

from seqarch.errors import UserError
from seqarch.kernels import linear_cross_entropy
from tests.kernels import inputs, naive


def draw(N=63, V=50, d=16, dtype=torch.float64, ignored=0):
    hidden, weight, targets = inputs.linear_cross_entropy(N, V, d, dtype=dtype).values()
    targets[:ignored] = -100
    return hidden, weight, targets


@pytest.mark.parametrize(
    ("N", "chunk_tokens"), [(1, None), (1, 64), (63, 1), (63, 64), (128, 64), (129, 64), (300, None), (300, 1000)]
)
def test_mean(N, chunk_tokens):
    hidden, weight, targets = draw(N, ignored=N // 3)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
    wanted = F.cross_entropy(hidden @ weight.T, targets)
    naive.assert_same_gradients(loss, wanted, (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", [None, 20])
def test_none(chunk_tokens):
    hidden, weight, targets = draw(ignored=5)
    losses = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens, reduction="none")
    wanted = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    naive.assert_same_gradients(losses, wanted, (hidden, weight))


def test_without_gradient_the_loss_is_the_same():
    hidden, weight, targets = draw(ignored=5)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=20)
    naive.assert_close(loss, F.cross_entropy(hidden @ weight.T, targets))


def test_another_ignore_index_and_a_frozen_weight():
    hidden, weight, targets = draw()
    loss = linear_cross_entropy(hidden, weight.detach(), targets, ignore_index=int(targets[0]))
    wanted = F.cross_entropy(hidden @ weight.T, targets, ignore_index=int(targets[0]))
    naive.assert_same_gradients(loss, wanted, (hidden,))


def test_second_derivatives():
    hidden, weight, targets = draw(N=6, V=5, d=4)

    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, targets, chunk_tokens=4, reduction="none").mean()

    assert torch.autograd.gradgradcheck(loss, (hidden, weight))
    with pytest.raises(UserError, match="has no second derivative: take reduction='none'"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)


def test_nothing_counts():
    hidden, weight, targets = draw(5, ignored=5)
    assert linear_cross_entropy(hidden, weight, targets).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Products in half precision, softmax and weight gradient in float32; gradients in the dtype of the inputs."""
    hidden, weight, targets = draw(256, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=32)
    assert loss.dtype == torch.float32
    exact = [t.detach().to(dtype).double().requires_grad_() for t in (hidden, weight)]
    wanted = F.cross_entropy(exact[0] @ exact[1].T, targets)
    naive.assert_close(loss, wanted, 2e-3)
    for got, right in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(wanted, exact), strict=True):
        assert got.dtype == torch.float32
        naive.assert_close(got, right, 1e-2)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_without_breaks(reduction):
    hidden, weight, targets = draw(ignored=3)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(hidden, weight, targets, chunk_tokens=20, reduction=reduction)
    wanted = F.cross_entropy(hidden @ weight.T, targets, reduction=reduction)
    naive.assert_same_gradients(loss, wanted, (hidden, weight))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_logits_are_not_kept(reduction):
    hidden, weight, targets = draw(N=512, V=300)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=64, reduction=reduction)
    assert max(kept) <= max(hidden.numel(), weight.numel())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, w, t: (h[None], w, t), r"hidden must have shape \[N, d\]"),
        (lambda h, w, t: (h[:, :3], w, t), r"weight must have shape \[V, d\] = \[V, 3\]"),
        (lambda h, w, t: (h, w, t[:-1]), "targets must have shape"),
        (lambda h, w, t: (h, w, t.int()), "targets must be of dtype torch.int64"),
        (lambda h, w, t: (h[:0], w, t[:0]), r"N must be at least 1 in hidden \[N, d\]"),
    ],
)
def test_wrong_tensors(change, message):
    with pytest.raises(UserError, match=message):
        linear_cross_entropy(*change(*draw()))


@pytest.mark.parametrize("options", [{"chunk_tokens": 0}, {"reduction": "max"}])
def test_wrong_options(options):
    with pytest.raises(UserError, match=next(iter(options))):
        linear_cross_entropy(*draw(), **options)
