"""What `seqarch scale` is asked to train."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

from seqarch.arguments import Interval
from seqarch.exam.request import Models, Runs


@dataclasses.dataclass(frozen=True)
class Request(Models):
    """What to train. `seqarch scale` takes these options and their help from here.

    Args:
        sizes: parameters of the reference at each rung, such as 10M.
        like: the exam's size that gives text, sequence length, tokens per step and first learning rate: tiny (bytes of
            the embedded corpus, for a CPU) or small (for a GPU).
        tokens_per_parameter: training tokens of the reference per parameter.
        match: what the models of a rung have in common: flops or tokens.
        ladder: whether each model finds its rate at the smallest rung; else all have the size's rate.
        out: folder of the rungs and of the summary, by default runs/scale; without training nothing is written by
            default.
    """

    seeds: Runs = 1
    sizes: Sequence[str] = ()
    like: Literal["tiny", "small"] = "tiny"
    tokens_per_parameter: Annotated[float, Interval(0, 10**6, "(]")] = 20.0
    match: Literal["flops", "tokens"] = "flops"
    ladder: bool = True
    out: str | None = None
