"""Softmax attention by each kernel that this GPU has, by length, head dims and window: which one "auto" should take."""

from collections.abc import Iterator
from functools import partial

from seqarch.bench.jobs import Row
from seqarch.bench.timing import DENSE, against, draw, passes
from seqarch.kernels import softmax_attention

TOKENS = 65536
"""Tokens of a batch, for sequences of up to so many."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 32768)
HEADS = ((12, 64), (16, 128))
WINDOW = 256


def rows() -> Iterator[Row]:
    """Time each dense kernel at each length; a window of 256 by FlexAttention and FlashAttention-4."""
    for T in LENGTHS:
        for H, D in HEADS:
            B = TOKENS // T
            tensors, shape = draw(B, T, H, D), {"B": B, "T": T, "H": H, "D": D}
            for name, op in DENSE.items():
                yield from passes(name, op, tensors, **shape)
            if T in (2048, 8192):
                ours = {name: partial(softmax_attention, window=WINDOW, backend=name) for name in ("flex", "fa4")}
                flex = list(passes("window flex", ours["flex"], tensors, **shape))
                yield from flex
                yield from (against(flex, row) for row in passes("window fa4", ours["fa4"], tensors, **shape))
