"""How fast a model draws tokens, one sequence at a time."""

import platform
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from seqarch.arguments import Count
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Scores, Task
from seqarch.model.generation import stream

WARM_UP = 5
"""Steps before the timed ones: kernels are compiled, and on a GPU the step is captured."""


class DecodingSpeed(Task):
    """Tokens per second of one sequence after a prompt, `decoding/tokens_per_second`: one over the median step.

    `decoding/state_elements` is the size of its decoding state after the prompt, in numbers. The speed depends on the
    machine, which the settings of the result name. Compare models on one machine that does nothing else.

    Args:
        prompt: random tokens that are read first; a cache of keys and values is larger after more of them.
        new: tokens that are drawn and timed.

    Raises:
        UserError: a number below 1.
    """

    group = "speed"
    reads_data = False
    decodes = True

    def __init__(self, prompt: Count = 512, new: Count = 64) -> None:
        self.prompt, self.new = prompt, new
        self.length = prompt + WARM_UP + new

    @property
    def settings(self) -> dict[str, Any]:
        cuda = torch.cuda.is_available()
        machine = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
        return {**super().settings, "machine": machine}

    def score(self, scorer: Scorer) -> Scores:
        draw = torch.Generator().manual_seed(0)
        prompt = torch.randint(scorer.lm.vocab_size, (1, self.prompt), generator=draw)
        times = []
        with scorer.evaluating(nullcontext):
            for _ in stream(scorer.lm, prompt, 1 + WARM_UP + self.new, temperature=0):
                times.append(time.perf_counter())  # a token is on the CPU, so its step is done
        speed = 1 / float(np.median(np.diff(times[WARM_UP:])))
        state = scorer.lm.state_bytes(self.prompt, torch.float32) / torch.float32.itemsize
        return Scores({"decoding/tokens_per_second": speed, "decoding/state_elements": state})
