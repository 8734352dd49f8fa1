import pytest
import torch
from torch.utils.checkpoint import checkpoint

from seqarch.kernels import checkpointing

CALLS = {"dear": 0, "cheap": 0}


def register(name):
    @torch.library.custom_op(f"seqarch_test::{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        CALLS[name] += 1
        return (x > 0).to(x.dtype)

    op.register_fake(torch.empty_like)
    return op


dear, cheap = register("dear"), register("cheap")


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_kept_runs_once(monkeypatch, compiled):
    monkeypatch.setattr(checkpointing, "KEPT", {"seqarch_test::dear"})

    def layer(x):
        return (x.sin() * dear(x.detach()) * cheap(x.detach())).cos()

    def run(x):
        return checkpoint(layer, x, use_reentrant=False, context_fn=checkpointing.keep_selections)

    torch.compiler.reset()
    op = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    x = torch.randn(5, requires_grad=True)
    op(x)
    CALLS.update(dear=0, cheap=0)
    y = op(x)
    y.sum().backward()
    assert CALLS == {"dear": 1, "cheap": 2}
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
