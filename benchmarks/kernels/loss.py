"""Linear cross-entropy next to a loss with all logits."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.bench.rows import Row
from seqarch.bench.timing import measure
from seqarch.kernels import linear_cross_entropy


def rows() -> Iterator[Row]:
    N, d, V = 65536, 768, 32000
    hidden = torch.randn(N, d, device="cuda", requires_grad=True)
    weight = (torch.randn(V, d, device="cuda") / 28).requires_grad_()
    targets = torch.randint(0, V, (N,), device="cuda")

    def gradients(op: Callable[..., Tensor], **options: Any) -> Callable[[], Any]:
        def run() -> Any:
            with torch.autocast("cuda", torch.bfloat16):
                return torch.autograd.grad(op(hidden, weight, targets, **options), (hidden, weight))

        return run

    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    for chunk in (4096, 8192, 16384):
        run = gradients(linear_cross_entropy, chunk_tokens=chunk)
        yield measure(f"loss eager, chunks of {chunk}", run, T=N, D=d)
    yield measure("loss compiled", gradients(compiled), T=N, D=d)

    def with_all_logits(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), t)

    yield measure("loss with all logits, compiled", gradients(torch.compile(with_all_logits)), T=N, D=d)
