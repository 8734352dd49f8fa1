"""What `seqarch scale` is asked to train."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from seqarch.arguments import Interval
from seqarch.exam.request import Runs


@dataclasses.dataclass(frozen=True)
class Request:
    """What to train. `seqarch scale` takes these options and their help from here.

    Args:
        mixers: mixers by their class, or recipes by name or file, as for `seqarch exam`.
        sizes: parameters of the reference at each rung, such as 10M.
        like: the exam's size that gives text, sequence length, tokens per step and first learning rate: tiny (bytes of
            the embedded corpus, for a CPU) or small (for a GPU).
        against: the reference, named like --mixer.
        tokens_per_parameter: training tokens of the reference per parameter.
        match: what the models of a rung have in common: flops or tokens.
        data: folder of shards, or of text files called <domain>; by default the data of the size's recipe.
        seeds: runs of each model at each rung.
        ladder: whether each model finds its rate at the smallest rung; else all have the size's rate.
        workers: runs to make at the same time; by default one per GPU, or one per core of a CPU.
        allow_code: packages whose classes the recipes may name.
        options: values by dotted keys, such as `data.sequences_per_step`, for every model.
        out: folder of the rungs and of the summary, by default runs/scale; without training nothing is written by
            default.
    """

    mixers: Sequence[str]
    sizes: Sequence[str] = ()
    like: Literal["tiny", "small"] = "tiny"
    against: str = "TransformerPlusPlus"
    tokens_per_parameter: Annotated[float, Interval(0, 10**6, "(]")] = 20.0
    match: Literal["flops", "tokens"] = "flops"
    data: str | None = None
    seeds: Runs = 1
    ladder: bool = True
    workers: Runs | None = None
    allow_code: Sequence[str] = ()
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    out: str | None = None
