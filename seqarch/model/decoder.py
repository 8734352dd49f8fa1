"""Continues prompts: reads them in passes, then draws token by token, on a GPU in steps that a CUDA graph replays."""

import dataclasses
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import torch
from torch import Tensor

from seqarch.arguments import Count, Interval, check_fields, typed
from seqarch.errors import SeqarchWarning, UserError, one_line
from seqarch.mixers.attention import Attend
from seqarch.mixers.base import Clock
from seqarch.model.block import Block
from seqarch.model.lm import LMState, SequenceLM

PREFILL = 8192
"""Tokens of each prompt that a pass reads, by default."""
PASS = 8 * PREFILL
"""Tokens of all prompts that a pass reads, at most."""
ALIGNED = 16
"""Passes are multiples of this number of tokens, as tiles of kernels are."""
ACTIVATIONS = 32
"""Memory of a pass: numbers per token and channel of the residual stream, an upper estimate."""

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
    top_k: Count | None = None
    top_p: Annotated[float, Interval(0, 1, "(]")] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.temperature != 0 and not COLDEST <= self.temperature < math.inf:
            raise UserError(f"temperature must be 0 (most likely token) or at least {COLDEST}, not {self.temperature}")
        check_drawn(self.temperature, top_k=self.top_k, top_p=self.top_p)

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


def check_drawn(temperature: float, **options: float | None) -> None:
    """Refuse options of the draw at temperature 0, where nothing is drawn."""
    for name, value in options.items():
        if temperature == 0 and value is not None:
            raise UserError(f"{name} has no effect at temperature 0: leave it out")


def _at_least(logits: Tensor, threshold: Tensor) -> Tensor:
    return logits.masked_fill(logits < threshold, -torch.inf)


class Decoder:
    """Continues batches of prompts: reads them in passes of bounded memory, then draws token by token.

    The model computes in its training's precision. On a GPU that is bf16 autocast for float32 weights, with caches in
    bf16; elsewhere, and for other weights, the dtype of the weights. `with_bf16_weights` saves the casts.

    Prompts of unequal length are exact for every mixer. The tokens that all have are read in passes; then all rows step
    together, and a row that still has prompt tokens takes those. So prompts of similar length go together best.

    Args:
        lm: the model.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw only among the k most likely tokens.
        top_p: draw only among the most likely tokens that together have this probability.
        generator: source of random numbers on the model's device; by default one that `torch.manual_seed` decides.
        prefill_chunk: most tokens of a prompt that one pass reads; fewer in large batches.
        capture: whether steps are replayed from a CUDA graph, if there are many; by default on a GPU.
        compiled: whether steps and passes of equal length are compiled, which takes up to a minute once and pays for
            many tokens.
    """

    @typed
    def __init__(
        self,
        lm: SequenceLM,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        prefill_chunk: Count = PREFILL,
        capture: bool | None = None,
        compiled: bool = False,
    ) -> None:
        self.lm = lm
        self.device = lm.embedding.weight.device
        self.sampling = Sampling(temperature, top_k, top_p)
        if generator is None and self.device.type == "cuda":
            # A generator of its own: a failed capture would leave the device's generator in the capture.
            generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, ())))
        self.generator = generator
        self.prefill_chunk = prefill_chunk
        self.capture = self.device.type == "cuda" if capture is None else capture
        self.compiled = compiled
        self.read_block: Any = torch.compile(_read_block) if compiled else Block.__call__
        weights = lm.embedding.weight.dtype
        self.dtype = torch.bfloat16 if self.device.type == "cuda" and weights == torch.float32 else weights

    def context(self) -> AbstractContextManager:
        """The context of a forward pass. Autocast remembers no weights: a CUDA graph would keep them."""
        if self.dtype == self.lm.embedding.weight.dtype:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)

    def check_memory(self, batch_size: int, length: int) -> None:
        """Refuse a batch whose states and passes cannot fit in memory.

        Raises:
            UserError: names the batch that fits.
        """
        fits = self.largest_batch(batch_size, length)
        if fits < batch_size:
            state, free = (size / 2**30 for size in (self.lm.state_bytes(length, self.dtype), free_memory(self.device)))
            sizes = f"a state takes {state:.2f} GiB, {free:.1f} GiB are free"
            better = f"batch_size {fits} fits" if fits else "give shorter prompts or fewer new tokens"
            raise UserError(f"{batch_size} sequences of {length:,} tokens do not fit in memory ({sizes}): {better}")

    def largest_batch(self, batch_size: int, length: int) -> int:
        """The largest batch up to `batch_size` whose states, of `length` tokens, and passes fit in memory; or 0."""
        each, free = self.lm.state_bytes(length, self.dtype), free_memory(self.device)
        channel = ACTIVATIONS * self.lm.d_model * self.dtype.itemsize
        sizes = (n for n in range(batch_size, 0, -1) if n * (each + self._piece(n, length) * channel) <= free)
        return next(sizes, 0)

    def run(self, prompts: Sequence[Tensor], max_new_tokens: int) -> Iterator[tuple[int, Tensor]]:
        """Yield each position after the shortest prompt with its tokens `[B]`, given or drawn."""
        shortest, longest = min(map(len, prompts)), max(map(len, prompts))
        tokens = torch.full((len(prompts), longest + max_new_tokens), -1, device=self.device)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        state = self.prefill(tokens[:, : shortest - 1], tokens.shape[1])
        step = StaticStep(self, state, tokens, shortest - 1)
        for position in range(shortest, tokens.shape[1]):
            step()
            yield position, tokens[:, position]

    @torch.no_grad()
    def prefill(self, tokens: Tensor, max_length: int) -> LMState:
        """The state after `tokens [B, T]`, read in passes of at most `prefill_chunk` tokens."""
        state = self.lm.init_state(len(tokens), max_length, self.device, self.dtype)
        size = self._pass(*tokens.shape)
        for piece in tokens.split(size, dim=1) if size else ():
            repeated = piece.shape[1] == size < tokens.shape[1]
            with self.context():
                self.lm(piece, state=state, last_only=True, run_block=self.read_block if repeated else Block.__call__)
        return state

    def _pass(self, batch_size: int, length: int) -> int:
        """Tokens of each pass but the last, which has those left: passes of one length are compiled once."""
        longest = self._piece(batch_size, length)
        if length <= longest:
            return length
        size = length // -(-length // longest)
        return size - size % ALIGNED or size

    def _piece(self, batch_size: int, length: int) -> int:
        return max(1, min(self.prefill_chunk, PASS // batch_size, length))


class StaticStep:
    """Reads the token at the clock's position, draws the next one and writes it, without asking the host anything.

    Where the decoder captures, the first steps run from Python; then one is captured in a CUDA graph, and the others
    replay it. With a state that cannot be pinned every step runs from Python.

    Args:
        decoder: says how a step computes and draws.
        state: of the tokens before `position`.
        tokens: `[B, T]`, -1 where a token is to be drawn; given tokens stay.
        position: of the first token to read.
    """

    def __init__(self, decoder: Decoder, state: LMState, tokens: Tensor, position: int) -> None:
        lm = decoder.lm
        self.decoder, self.state, self.tokens = decoder, state, tokens
        self.clock = Clock.at(position, len(tokens), tokens.device)
        self.static = is_static(lm)
        if self.static:
            state.pin(self.clock)
            for module in lm.modules():
                if isinstance(module, Attend):
                    module.prepare(self.clock, tokens.shape[1], lm.embedding.weight.dtype)
        drawn = decoder.sampling.temperature != 0
        self.noise = tokens.new_ones(len(tokens), lm.vocab_size, dtype=torch.float32) if drawn else None
        compiled = decoder.compiled and self.static
        self.run_block: Any = torch.compile(_run_block, dynamic=False) if compiled else Block.__call__
        self.graph: torch.cuda.CUDAGraph | None = None
        capture = decoder.capture and self.static and tokens.shape[1] - position > 4 * WARM_UP
        self.warm_ups = WARM_UP if capture else -1
        self.stream = torch.cuda.Stream(tokens.device) if capture else None

    def __call__(self) -> None:
        """Read one token of each sequence and write the next."""
        if self.noise is not None:
            self.noise.exponential_(generator=self.decoder.generator)
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
        with self.decoder.context():
            logits = self.decoder.lm(token, state=self.state, last_only=True, run_block=self.run_block)[:, -1].float()
        if not self.static:
            self.clock.tick()
        drawn = self.decoder.sampling.draw(logits, self.noise)
        prompt = self.tokens.index_select(1, self.clock.position).squeeze(1)
        following = torch.where(prompt < 0, drawn, prompt).unsqueeze(1)
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


def _read_block(block: Block, *args: Any, **options: Any) -> Any:
    """As `_run_block`, for passes over prompts; compiled code of steps and passes counts against limits of its own."""
    return block.forward(*args, **options)


def free_memory(device: torch.device) -> int:
    """Bytes that tensors on the device may still take; on a CPU all of the machine's."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
