"""Linear cross-entropy next to a loss with all logits."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.bench.jobs import Row
from seqarch.bench.timing import measure
from seqarch.kernels import linear_cross_entropy


def vocabularies() -> Iterator[Row]:
    """The losses of 16,384 tokens with 32,000 and with 131,072 entries."""
    for V in (32_000, 131_072):
        for row in rows(16_384, V, chunks=(4096,)):
            yield {**row, "name": f"{row['name']}, {V:,} entries"}


def rows(N: int = 65536, V: int = 32000, chunks: Sequence[int] = (4096, 8192, 16384)) -> Iterator[Row]:
    d = 768
    hidden = torch.randn(N, d, device="cuda", requires_grad=True)
    weight = (torch.randn(V, d, device="cuda") / 28).requires_grad_()
    targets = torch.randint(0, V, (N,), device="cuda")

    def gradients(op: Callable[..., Tensor], **options: Any) -> Callable[[], Any]:
        def run() -> Any:
            with torch.autocast("cuda", torch.bfloat16):
                return torch.autograd.grad(op(hidden, weight, targets, **options), (hidden, weight))

        return run

    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    for chunk in chunks:
        run = gradients(linear_cross_entropy, chunk_tokens=chunk)
        yield measure(f"loss eager, chunks of {chunk}", run, T=N, D=d)
    yield measure("loss compiled", gradients(compiled), T=N, D=d)

    def with_all_logits(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), t)

    yield measure("loss with all logits, compiled", gradients(torch.compile(with_all_logits)), T=N, D=d)
