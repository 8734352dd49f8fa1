"""A step of generation as a function of tensors that stay in place, replayed from a CUDA graph if there is one."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from seqarch.errors import SeqarchWarning, UserError, check_counts, one_line
from seqarch.mixers.attend import Attend
from seqarch.mixers.base import Clock
from seqarch.model.block import Block
from seqarch.model.lm import LMState, SequenceLM

WARM_UP = 3
"""Steps before the capture, in which kernels are compiled and tuned."""
COLDEST = 1e-4
"""Lowest temperature other than 0."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The options for drawing a token from logits.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw only among the k most likely tokens.
        top_p: draw only among the most likely tokens that together have this probability.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0 and not COLDEST <= self.temperature < math.inf:
            raise UserError(
                f"temperature must be 0 (the most likely token) or a number of at least {COLDEST}, "
                f"not {self.temperature}"
            )
        check_counts(top_k=self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p}")

    def draw(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Tokens `[B]` for `logits [B, V]`; `noise [B, V]` is drawn from the exponential distribution of mean 1."""
        if noise is None:
            return logits.argmax(dim=-1)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = _at_least(logits, logits.topk(self.top_k, dim=-1).values[:, -1:])
        if self.top_p is not None and self.top_p < 1:
            falling = logits.sort(dim=-1, descending=True).values
            share = falling.softmax(dim=-1)
            inside = share.cumsum(dim=-1) - share < self.top_p
            logits = _at_least(logits, falling.masked_fill(~inside, torch.inf).amin(dim=-1, keepdim=True))
        return (logits - noise.log()).argmax(dim=-1)  # the Gumbel-max trick, which needs no check on the host


def _at_least(logits: Tensor, threshold: Tensor) -> Tensor:
    return logits.masked_fill(logits < threshold, -torch.inf)


class StaticStep:
    """Reads the token at the clock's position, draws the next one and writes it, without asking the host anything.

    Where the device is a GPU, the first steps run from Python; then one is captured in a CUDA graph, and the others
    replay it. With a state that cannot be pinned every step runs from Python.

    Args:
        lm: the model.
        state: of the tokens before `position`.
        tokens: `[B, T]`, -1 where a token is to be drawn; given tokens stay.
        position: of the first token to read.
        sampling: how tokens are drawn.
        context: returns the context of a forward pass, such as autocast.
        capture: whether steps are replayed from a CUDA graph.
        compiled: whether the step is compiled, which fuses its kernels and takes up to a minute the first time.
    """

    def __init__(
        self,
        lm: SequenceLM,
        state: LMState,
        tokens: Tensor,
        position: int,
        sampling: Sampling,
        *,
        context: Callable[[], AbstractContextManager],
        capture: bool,
        compiled: bool = False,
    ) -> None:
        self.lm, self.state, self.tokens, self.sampling, self.context = lm, state, tokens, sampling, context
        self.clock = Clock.at(position, len(tokens), tokens.device)
        self.static = is_static(lm)
        if self.static:
            state.pin(self.clock)
            for module in lm.modules():
                if isinstance(module, Attend):
                    module.prepare(self.clock, tokens.shape[1], lm.embedding.weight.dtype)
        self.noise = tokens.new_ones(len(tokens), lm.vocab_size, dtype=torch.float32) if sampling.temperature else None
        self.run_block: Any = torch.compile(_run_block, dynamic=False) if compiled and self.static else Block.__call__
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm_ups = WARM_UP if capture and self.static else -1
        self.stream = torch.cuda.Stream(tokens.device) if self.warm_ups > 0 else None

    def __call__(self, generator: torch.Generator | None = None) -> None:
        """Read one token of each sequence and write the next."""
        if self.noise is not None:
            self.noise.exponential_(generator=generator)
        if self.graph is None and self.warm_ups == 0:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
        elif self.stream is None:
            self._step()
        else:  # on the stream of the capture
            self.stream.wait_stream(torch.cuda.current_stream(self.tokens.device))
            with torch.cuda.stream(self.stream):
                self._step()
            torch.cuda.current_stream(self.tokens.device).wait_stream(self.stream)
        self.warm_ups -= 1

    @torch.no_grad()
    def _step(self) -> None:
        token = self.tokens.index_select(1, self.clock.position)
        with self.context():
            logits = self.lm(token, state=self.state, last_only=True, run_block=self.run_block)[:, -1].float()
        if not self.static:
            self.clock.tick()
        drawn = self.sampling.draw(logits, self.noise)
        given = self.tokens.index_select(1, self.clock.position).squeeze(1)
        following = torch.where(given < 0, drawn, given).unsqueeze(1)
        self.tokens.index_copy_(1, self.clock.position, following)

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self._step()
        except Exception as error:  # whatever an op raises that waits for the device
            slower = "the decoding step cannot be captured, so it runs from Python, which is slower"
            warnings.warn(f"{slower}: {one_line(error)}", SeqarchWarning, stacklevel=2)
            for block in self.state.blocks:
                block.settle(keep=False)
            return
        self.graph = graph


def is_static(lm: SequenceLM) -> bool:
    """Whether every mixer of the model computes static steps."""
    return lm.init_state(1, 1, "meta", lm.embedding.weight.dtype).pin(Clock.at(0, 1, "meta"))


def _run_block(block: Block, *args: Any, **options: Any) -> Any:
    """A block's forward pass, so that it is compiled once for all layers of a kind."""
    return block.forward(*args, **options)
