"""Builds a mixer and runs it in every way that the contract knows; the tests of `MixerSuite` use it.

Pieces of one sequence run in threads of one process, which exchange through its memory.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from seqarch.mixers.base import Carry, Mixer, MixerState
from seqarch.mixers.pieces import Piece, fill, in_turn, numbers_of, state_before
from seqarch.testing.compare import assert_all_close

SECONDS = 20.0
"""After which a thread waits in vain for another one."""


class Board:
    """Where `size` threads show each other values. All of them do so equally often."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=SECONDS)

    def shown(self, rank: int, value: Any) -> list[Any]:
        """The values of all threads, by rank, once all have shown one."""
        self._values[rank] = value
        self._barrier.wait()
        values = [*self._values]
        self._barrier.wait()
        return values

    def run(self, of_rank: Callable[[int], Tensor]) -> list[Tensor]:
        """The results of a function in one thread for each rank."""

        def guarded(rank: int) -> Tensor:
            try:
                return of_rank(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(self._values)) as pool:
            done = [pool.submit(guarded, rank) for rank in range(len(self._values))]
        errors = [error for each in done if (error := each.exception())]
        if own := [each for each in errors if not isinstance(each, threading.BrokenBarrierError)]:
            raise own[0]
        assert not errors, "the processes of a sequence exchange unequally often: one of them waits forever"
        return [each.result() for each in done]


@dataclasses.dataclass(frozen=True)
class SharedPiece(Piece):
    """One of several pieces, or of two where they are read in turn. Tensors keep their gradients between threads."""

    board: Board = dataclasses.field(kw_only=True)

    def stacked(self, x: Tensor) -> Tensor:
        return torch.stack(self.board.shown(self.rank, x))

    def exchanged(self, x: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        shown = self.board.shown(self.rank, x.split([*given]))
        return torch.cat([parts[self.rank] for parts in shown])

    def receive(self, x: Tensor, state: Any) -> Tensor:
        if self.rank:
            numbers, tensors = self.board.shown(self.rank, None)[self.rank - 1]
            fill(state, tensors, numbers)
        return x

    def send(self, y: Tensor, state: Any) -> Tensor:
        if not self.rank:
            self.board.shown(self.rank, (numbers_of(state), state.tensors()))
        return y


Configuration = dict[str, Any]


@dataclasses.dataclass
class Inputs:
    """Inputs of a mixer's `forward`: `x [B, T, d_model]` and the carry of the layers before it, `[B, T, ...]` each."""

    x: Tensor
    carry: Carry = dataclasses.field(default_factory=dict)

    def map(self, function: Any, *others: "Inputs") -> "Inputs":
        """What a function makes of each tensor and the same one of `others`."""
        carry = {name: function(tensor, *(each.carry[name] for each in others)) for name, tensor in self.carry.items()}
        return Inputs(function(self.x, *(each.x for each in others)), carry)

    def named(self) -> dict[str, Tensor]:
        return {"x": self.x, **self.carry}

    def cut(self, sizes: Sequence[int]) -> "list[Inputs]":
        """Pieces of these sizes, one after the other."""
        borders = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        return [self.map(lambda tensor, a=start, b=stop: tensor[:, a:b]) for start, stop in borders]


class MixerHarness:
    """The settings of `MixerSuite` for a mixer, and the ways of running it."""

    mixer: ClassVar[type[Mixer]]
    """The mixer under test."""

    options: ClassVar[Configuration | list[Configuration]] = {}
    """Its options; each test runs once for every entry of a list."""

    d_model: ClassVar[int] = 32

    lengths: ClassVar[tuple[int, ...]] = (1, 2, 13, 37)
    """Sequence lengths; the longest should cover more than two chunks of a mixer that works in chunks."""

    piece: ClassVar[int] = 8
    """Length of the pieces of a sequence that is fed chunk by chunk."""

    tolerance: ClassVar[float] = 1e-9
    """Largest root-mean-square difference between ways of running in float64, relative where results exceed 1."""

    float32_tolerance: ClassVar[float] = 1e-4
    """Largest relative difference of float32 from float64, outputs and gradients."""

    bfloat16_tolerance: ClassVar[float] = 0.03
    """Largest relative difference of bfloat16 outputs from float32."""

    differentiable: ClassVar[bool] = True
    """Whether the gradient is the derivative; not so for a straight-through estimator."""

    compiles: ClassVar[bool] = True
    """Whether `torch.compile` is tested."""

    compile_options: ClassVar[dict[str, Any]] = {"backend": "aot_eager", "fullgraph": True}
    """Options of `torch.compile`; the backend "inductor" takes far longer and tests PyTorch more than the mixer."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "configuration" in metafunc.fixturenames:
            options = self.options if isinstance(self.options, list) else [self.options]
            names = ["-".join(f"{key}={value}" for key, value in entry.items()) or "default" for entry in options]
            if metafunc.function.__name__ == "test_compile":  # seconds each: by default for the first entry
                options = [options[0], *(pytest.param(entry, marks=pytest.mark.slow) for entry in options[1:])]
            metafunc.parametrize("configuration", options, ids=names)

    def build(self, configuration: Configuration, dtype: torch.dtype = torch.float64, layer_idx: int = 1) -> Mixer:
        """The mixer with parameters moved from their initial values."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            mixer = self.mixer(self.d_model, layer_idx, 3, **configuration)
            mixer.register_buffer("like_inputs", torch.empty(0), persistent=False)  # there may be no parameter
            with torch.no_grad():
                for parameter in mixer.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return mixer.to(dtype)

    def inputs(self, mixer: Mixer, configuration: Configuration, batch: int, length: int, seed: int = 0) -> Inputs:
        """Random inputs in the dtype of the mixer that require a gradient."""
        dtype = next(mixer.parameters(), getattr(mixer, "like_inputs", torch.empty(0))).dtype
        generator = torch.Generator().manual_seed(seed)
        inputs = Inputs(torch.randn(batch, length, self.d_model, generator=generator))
        first: Carry = {}
        if "carry" in mixer.takes:
            self.build(configuration, torch.float32, layer_idx=0)(inputs.x, carry=first)
        inputs.carry = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in first.items()}
        return inputs.map(lambda tensor: tensor.to(dtype).requires_grad_())

    def of_each_length(
        self, mixer: Mixer, configuration: Configuration, batch: int = 2
    ) -> Iterator[tuple[int, Inputs]]:
        """Each of `lengths`, with inputs of that length."""
        return ((length, self.inputs(mixer, configuration, batch, length)) for length in self.lengths)

    def drawn(self, configuration: Configuration, dtype: torch.dtype = torch.float64) -> tuple[Mixer, Inputs]:
        """The mixer, and two sequences of the greatest length."""
        mixer = self.build(configuration, dtype)
        return mixer, self.inputs(mixer, configuration, 2, max(self.lengths))

    @staticmethod
    def run(mixer: Any, inputs: Inputs, **options: Any) -> Tensor:
        """The output, as a block of a model asks for it. Ids of tokens are signs of `x`, and so change with it."""
        tokens = (inputs.x[..., 0] > 0) + 2 * (inputs.x[..., 1] > 0)
        return mixer(inputs.x, **mixer.arguments(**options, carry=dict(inputs.carry), tokens=tokens))

    def run_pieces(self, mixer: Mixer, inputs: Inputs, pieces: Sequence[int], max_length: int | None = None) -> Tensor:
        """The output of the sequence fed in `pieces` through a state."""
        batch, length = inputs.x.shape[:2]
        state = mixer.init_state(batch, max_length or length, inputs.x.device, inputs.x.dtype)
        return torch.cat([self.run(mixer, piece, state=state) for piece in inputs.cut(pieces)], dim=1)

    def run_shared(self, mixer: Mixer, inputs: Inputs, processes: int = 2, cu_seqlens: Tensor | None = None) -> Tensor:
        """The output of a sequence whose pieces are read at the same time, as processes that share it read them."""
        batch, total = inputs.x.shape[:2]
        length = total // processes
        board, parts = Board(processes), inputs.cut([length] * processes)

        def read(rank: int) -> Tensor:
            part = parts[rank]
            piece = SharedPiece(rank, processes, length, board=board)
            state = state_before(mixer, piece, batch, part.x.device, part.x.dtype)
            if state.piece is not None:
                return self.run(mixer, part, state=state, cu_seqlens=cu_seqlens)
            layer = lambda x, state: self.run(mixer, Inputs(x, part.carry), state=state)  # noqa: E731
            return in_turn(layer, part.x, piece, {"state": state})

        return torch.cat(board.run(read), dim=1)

    def run_documents(self, mixer: Mixer, inputs: Inputs, documents: Sequence[int]) -> Tensor:
        """The output of each document of a packed row, each that is not empty run by itself."""
        return torch.cat([self.run(mixer, piece) for piece in inputs.cut([*filter(None, documents)])], dim=1)

    @staticmethod
    def leaves(mixer: Mixer, inputs: Inputs) -> dict[str, Tensor]:
        """The inputs and the parameters that are trained, by their names."""
        return {**inputs.named(), **{name: each for name, each in mixer.named_parameters() if each.requires_grad}}

    @staticmethod
    def with_gradients(mixer: Mixer, inputs: Inputs, output: Tensor, size: float = 1.0) -> dict[str, Tensor]:
        """The output and the gradients of its `weighted` sum, computed from `size` times this sum."""
        leaves = MixerHarness.leaves(mixer, inputs)
        loss = size * MixerHarness.weighted(output)
        gradients = zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True)
        found = {f"gradient of {name}": grad / size for name, grad in gradients if grad is not None}
        return {"output": output, **found}

    def assert_same(self, way: str, mixer: Mixer, inputs: Inputs, actual: Tensor, expected: Tensor) -> None:
        """Compare outputs of two ways to run a mixer, and their gradients; `way` names that of `actual`."""
        found, wanted = (self.with_gradients(mixer, inputs, output) for output in (actual, expected))
        assert_all_close(way, found, wanted, self.tolerance)

    @staticmethod
    def weighted(output: Tensor) -> Tensor:
        """The sum of the elements with fixed random weights."""
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        return (output * weights.to(output.dtype)).sum()

    def splits(self, length: int) -> list[list[int]]:
        """Ways to cut a sequence: token by token, chunk by chunk, at odd places."""
        chunks = [self.piece] * (length // self.piece) + [length % self.piece] * (length % self.piece > 0)
        return [[1] * length, chunks, [part for part in (length // 3, 1, length - length // 3 - 1) if part > 0]]

    def require(self, configuration: Configuration, capability: str) -> Mixer:
        """The mixer, for a test of something that it must claim to do; else the test is skipped."""
        mixer = self.build(configuration)
        if capability not in mixer.capabilities:
            pytest.skip(f"{self.mixer.__name__} does not claim '{capability}'")
        return mixer


def borders(documents: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(documents)], dtype=torch.int32)


def replaced_from_each(inputs: Inputs, noise: Inputs) -> Inputs:
    """One batch with the inputs for each place t from 1 on, where noise replaces them from t on."""
    return inputs.map(lambda a, b: torch.cat([torch.cat((a[:, :t], b[:, t:]), 1) for t in range(1, a.shape[1])]), noise)


def storages(state: MixerState) -> dict[int, int]:
    """Address and bytes of each block of memory that the state keeps alive."""
    found = (tensor.untyped_storage() for tensor in state.tensors())
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}
