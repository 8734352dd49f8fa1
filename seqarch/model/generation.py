"""Tokens from a trained model, through its decoding state."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from seqarch.errors import UserError, check_counts
from seqarch.model.lm import LMState, SequenceLM
from seqarch.model.static_step import WARM_UP, Sampling, StaticStep

PREFILL = 8192
"""Tokens of each prompt that a pass reads, by default."""
PASS = 8 * PREFILL
"""Tokens of all prompts that a pass reads, at most."""
ACTIVATIONS = 32
"""Memory of a pass: numbers per token and channel of the residual stream, an upper estimate."""

Stop = Collection[int] | Callable[[int, list[int]], bool]
"""Tokens that end a sequence, or a function of a prompt's index and its new tokens that says whether it has ended."""


def generate(lm: SequenceLM, prompts: Tensor | Sequence[Tensor], max_new_tokens: int, **options: Any) -> list[Tensor]:
    """Return the new tokens of each prompt, in the order of the prompts, each a 1-D tensor on the CPU.

    Arguments and errors are those of `stream`, such as `stop`, `batch_size` and `temperature`.
    """
    found: dict[int, list[int]] = {}
    for row, token in stream(lm, prompts, max_new_tokens, **options):
        found.setdefault(row, []).append(token)
    return [torch.tensor(found.get(row, []), dtype=torch.int64) for row in range(len(prompts))]


def stream(
    lm: SequenceLM,
    prompts: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    *,
    stop: Stop = (),
    batch_size: int | None = None,
    **options: Any,
) -> Iterator[tuple[int, int]]:
    """Yield the index of a prompt and its next token, as tokens are drawn.

    Args:
        lm: a model whose mixers can all decode, on its device; see `Decoder` for its precision.
        prompts: token ids, `[B, T]` or a list of 1-D tensors of any lengths of at least 1.
        max_new_tokens: most tokens to draw for each prompt.
        stop: token ids that end a sequence, or a function that takes the index of a prompt and its new tokens, and says
            whether they end there; the last token is kept.
        batch_size: prompts that are read together, those of similar length; by default all.
        **options: as in `Decoder`.

    Raises:
        UserError: an empty prompt or one that is not token ids, options out of range, a mixer that cannot decode, or a
            batch too large for memory.
    """
    check_counts(max_new_tokens=max_new_tokens, batch_size=batch_size)
    decoder = Decoder(lm, **options)
    rows = list(prompts)
    if not rows or not all(map(torch.numel, rows)):
        raise UserError("a prompt is empty: give at least one token")
    if any(row.ndim != 1 or row.is_floating_point() or row.min() < 0 or row.max() >= lm.vocab_size for row in rows):
        raise UserError(f"each prompt must be a 1-D tensor of token ids, whole numbers in 0..{lm.vocab_size - 1}")
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    size = batch_size or len(rows)
    decoder.check_memory(min(size, len(rows)), max(map(len, rows)) + max_new_tokens)
    return _batches(decoder, rows, [order[i : i + size] for i in range(0, len(order), size)], max_new_tokens, stop)


def _batches(
    decoder: "Decoder", rows: list[Tensor], batches: list[list[int]], max_new_tokens: int, stop: Stop
) -> Iterator[tuple[int, int]]:
    ends = stop if callable(stop) else lambda row, new: new[-1] in stop
    for batch in batches:
        lengths = [len(rows[row]) for row in batch]
        going: dict[int, list[int]] = {place: [] for place in range(len(batch))}
        for position, drawn in decoder.run([rows[row] for row in batch], max_new_tokens):
            for place, token in enumerate(drawn.tolist()):
                if place in going and position >= lengths[place]:
                    going[place].append(token)
                    yield batch[place], token
                    if len(going[place]) == max_new_tokens or ends(batch[place], going[place]):
                        del going[place]
            if not going:
                break


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
        capture: whether steps are replayed from a CUDA graph; by default on a GPU.
        compiled: whether the step is compiled, which takes up to a minute once and pays for many tokens.
    """

    def __init__(
        self,
        lm: SequenceLM,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        prefill_chunk: int = PREFILL,
        capture: bool | None = None,
        compiled: bool = False,
    ) -> None:
        check_counts(prefill_chunk=prefill_chunk)
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
        weights = lm.embedding.weight.dtype
        self.dtype = torch.bfloat16 if self.device.type == "cuda" and weights == torch.float32 else weights
        self.autocast = self.dtype != weights

    def context(self) -> AbstractContextManager:
        """The context of a forward pass. Autocast remembers no weights: a CUDA graph would keep them."""
        if not self.autocast:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)

    def check_memory(self, batch_size: int, length: int) -> None:
        """Refuse a batch whose states and passes cannot fit in memory.

        Raises:
            UserError: names the batch that fits.
        """
        fits = self.largest_batch(batch_size, length)
        if fits < batch_size:
            each, free = self.lm.state_bytes(length, self.dtype), free_memory(self.device)
            raise UserError(
                f"{batch_size} sequences of {length:,} tokens do not fit in memory: a state takes "
                f"{each / 2**30:.2f} GiB, {free / 2**30:.1f} GiB are free; batch_size {fits} fits"
                + ("" if fits else ", so give shorter prompts or fewer new tokens")
            )

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
        step = self.step(state, tokens, shortest - 1)
        for position in range(shortest, tokens.shape[1]):
            step(self.generator)
            yield position, tokens[:, position]

    def step(self, state: LMState, tokens: Tensor, position: int) -> StaticStep:
        """The step that goes on at `position` of `tokens [B, T]`."""
        capture = self.capture and tokens.shape[1] - position > 4 * WARM_UP
        options = {"context": self.context, "capture": capture, "compiled": self.compiled}
        return StaticStep(self.lm, state, tokens, position, self.sampling, **options)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, max_length: int) -> LMState:
        """The state after `tokens [B, T]`, read in passes of `prefill_chunk` tokens."""
        state = self.lm.init_state(len(tokens), max_length, self.device, self.dtype)
        for piece in tokens.split(self._piece(*tokens.shape), dim=1) if tokens.shape[1] else ():
            with self.context():
                self.lm(piece, state=state, last_only=True)
        return state

    def _piece(self, batch_size: int, length: int) -> int:
        return max(1, min(self.prefill_chunk, PASS // batch_size, length))


def with_bf16_weights(lm: SequenceLM) -> SequenceLM:
    """Cast the weights of linear layers, in place, as autocast would at every pass: results stay the same.

    The embedding stays as it is, and no longer shares its weights with the head.
    """
    for layer in lm.modules():
        if isinstance(layer, nn.Linear):
            for name, parameter in list(layer.named_parameters(recurse=False)):
                setattr(layer, name, nn.Parameter(parameter.detach().bfloat16(), requires_grad=False))
    return lm


def free_memory(device: torch.device) -> int:
    """Bytes that tensors on the device may still take; on a CPU all of the machine's."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
