"""The test of the mixer contract: what any mixer, built in or from a plug-in, inherits.

from seqarch.testing import MixerSuite

class TestMyMixer(MixerSuite):
    mixer = MyMixer
    options = {"n_heads": 4}
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from seqarch.errors import UserError
from seqarch.mixers.base import CAPABILITIES, Mixer, MixerState

Configuration = dict[str, Any]


@dataclasses.dataclass
class Inputs:
    """What a mixer's `forward` takes: `x [B, T, d_model]` and, with a value residual, `v_first [B, T, ...]`."""

    x: Tensor
    v_first: Tensor | None = None

    def map(self, function: Any) -> Inputs:
        return Inputs(function(self.x), None if self.v_first is None else function(self.v_first))

    def named(self) -> dict[str, Tensor]:
        return {"x": self.x} if self.v_first is None else {"x": self.x, "v_first": self.v_first}


class MixerSuite:
    """Tests that every mixer passes; subclass it, name the class `Test...`, set `mixer` and `options`.

    The ways of running a mixer are compared in float64, where only a mistake makes a difference, with all parameters
    moved away from their initial values, so that a projection that starts at zero hides nothing.
    """

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
            metafunc.parametrize("configuration", options, ids=names)

    # What the tests are made of

    def build(self, configuration: Configuration, dtype: torch.dtype = torch.float64, layer_idx: int = 1) -> Mixer:
        """The mixer with parameters moved from their initial values."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            mixer = self.mixer(self.d_model, layer_idx, 3, **configuration)
            with torch.no_grad():
                for parameter in mixer.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return mixer.to(dtype)

    def inputs(self, mixer: Mixer, configuration: Configuration, batch: int, length: int, seed: int = 0) -> Inputs:
        """Random inputs in the dtype of the mixer that require a gradient."""
        dtype = next(mixer.parameters()).dtype
        generator = torch.Generator().manual_seed(seed)
        inputs = Inputs(torch.randn(batch, length, self.d_model, generator=generator))
        if mixer.value_residual:
            _, first = self.build(configuration, torch.float32, layer_idx=0)(inputs.x)
            inputs.v_first = torch.randn(first.shape, generator=generator)
        return inputs.map(lambda tensor: tensor.to(dtype).requires_grad_())

    @staticmethod
    def run(mixer: Any, inputs: Inputs, **options: Any) -> Tensor:
        """The output alone."""
        if mixer.value_residual:
            return mixer(inputs.x, v_first=inputs.v_first, **options)[0]
        return mixer(inputs.x, **options)

    def run_pieces(self, mixer: Mixer, inputs: Inputs, pieces: Sequence[int], max_length: int | None = None) -> Tensor:
        """The output of the sequence fed in `pieces` through a state."""
        batch, length = inputs.x.shape[:2]
        state = mixer.init_state(batch, max_length or length, "cpu", inputs.x.dtype)
        outputs = []
        for start, size in zip(_starts(pieces), pieces, strict=True):
            piece = inputs.map(lambda tensor, a=start, n=size: tensor[:, a : a + n])
            outputs.append(self.run(mixer, piece, state=state))
        return torch.cat(outputs, dim=1)

    def run_documents(self, mixer: Mixer, inputs: Inputs, documents: Sequence[int]) -> Tensor:
        """The output of each document of a packed row, run alone."""
        pieces = (
            inputs.map(lambda tensor, a=start, n=size: tensor[:, a : a + n])
            for start, size in zip(_starts(documents), documents, strict=True)
        )
        return torch.cat([self.run(mixer, piece) for piece in pieces], dim=1)

    @staticmethod
    def with_gradients(mixer: Mixer, inputs: Inputs, output: Tensor) -> dict[str, Tensor]:
        """The output and the gradients of its `weighted` sum."""
        leaves = {**inputs.named(), **dict(mixer.named_parameters())}
        gradients = torch.autograd.grad(MixerSuite.weighted(output), list(leaves.values()), allow_unused=True)
        found = {f"gradient of {name}": grad for name, grad in zip(leaves, gradients, strict=True) if grad is not None}
        return {"output": output, **found}

    @staticmethod
    def weighted(output: Tensor) -> Tensor:
        """The sum of the elements with fixed random weights."""
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        return (output * weights.to(output.dtype)).sum()

    def splits(self, length: int) -> list[list[int]]:
        """Ways to cut a sequence: token by token, chunk by chunk, at odd places."""
        chunks = [self.piece] * (length // self.piece) + [length % self.piece] * (length % self.piece > 0)
        odd = [part for part in (length // 3, 1, length - length // 3 - 1) if part > 0]
        return [[1] * length, chunks, odd]

    def require(self, configuration: Configuration, capability: str) -> None:
        """Skip a test of something that the mixer does not claim to do."""
        if capability not in self.build(configuration).capabilities:
            pytest.skip(f"{self.mixer.__name__} does not claim '{capability}'")

    # Shapes, time and batch

    def test_shape_and_dtype(self, configuration: Configuration) -> None:
        for dtype in (torch.float32, torch.float64):
            mixer = self.build(configuration, dtype)
            for length in self.lengths:
                inputs = self.inputs(mixer, configuration, 2, length)
                before = inputs.x.detach().clone()
                output = self.run(mixer, inputs)
                assert output.shape == inputs.x.shape, f"T={length}: shape {tuple(output.shape)}"
                assert output.dtype == dtype, f"T={length}: {output.dtype} for an input of {dtype}"
                assert output.isfinite().all(), f"T={length}: the output is not finite"
                assert torch.equal(before, inputs.x), f"T={length}: the input was changed"

    def test_causality(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        length = max(self.lengths)
        with torch.no_grad():
            inputs = self.inputs(mixer, configuration, 2, length)
            noise = self.inputs(mixer, configuration, 2, length, seed=1)
            output = self.run(mixer, inputs)
            for t in range(1, length):
                other = self.run(mixer, _replace_from(inputs, noise, t))
                assert_close(
                    f"outputs before {t} when the input from {t} on changes",
                    other[:, :t],
                    output[:, :t],
                    self.tolerance,
                )
            for t in self.lengths:
                prefix = self.run(mixer, inputs.map(lambda tensor, end=t: tensor[:, :end]))
                assert_close(f"the first {t} outputs without what follows", prefix, output[:, :t], self.tolerance)

    def test_batch_permutation(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        for length in self.lengths:
            inputs = self.inputs(mixer, configuration, 3, length)
            output = self.run(mixer, inputs)
            for rows in ([2, 0, 1], [1]):
                chosen = self.run(mixer, inputs.map(lambda tensor, index=rows: tensor[index]))
                assert_close(f"T={length}, rows {rows} of the batch", chosen, output[rows], self.tolerance)

    def test_train_and_eval_agree(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        for length in self.lengths:
            inputs = self.inputs(mixer, configuration, 2, length)
            trained = self.with_gradients(mixer.train(), inputs, self.run(mixer, inputs))
            evaluated = self.with_gradients(mixer.eval(), inputs, self.run(mixer, inputs))
            assert_all_close(f"T={length}, eval()", evaluated, trained, self.tolerance)

    # Ways of running

    def test_pieces_with_gradients(self, configuration: Configuration) -> None:
        self.require(configuration, "decode")
        mixer = self.build(configuration)
        for length in self.lengths:
            inputs = self.inputs(mixer, configuration, 2, length)
            whole = self.with_gradients(mixer, inputs, self.run(mixer, inputs))
            for pieces in self.splits(length):
                split = self.with_gradients(mixer, inputs, self.run_pieces(mixer, inputs, pieces))
                assert_all_close(f"T={length} in pieces {pieces}", split, whole, self.tolerance)

    @torch.no_grad()
    def test_pieces_without_gradients(self, configuration: Configuration) -> None:
        self.require(configuration, "decode")
        mixer = self.build(configuration)
        for length in self.lengths:
            inputs = self.inputs(mixer, configuration, 2, length)
            whole = self.run(mixer, inputs)
            for pieces in self.splits(length):
                for room in (0, 5):
                    split = self.run_pieces(mixer, inputs, pieces, length + room)
                    name = f"T={length} in pieces {pieces}, max_length {length + room}, no gradients"
                    assert_close(name, split, whole, self.tolerance)

    def test_packed_documents(self, configuration: Configuration) -> None:
        self.require(configuration, "packed")
        mixer = self.build(configuration)
        for documents in (self.lengths, self.lengths[::-1], (max(self.lengths),)):
            inputs = self.inputs(mixer, configuration, 1, sum(documents))
            packed = self.run(mixer, inputs, cu_seqlens=_borders(documents))
            alone = self.run_documents(mixer, inputs, documents)
            assert_all_close(
                f"documents of {documents} packed",
                self.with_gradients(mixer, inputs, packed),
                self.with_gradients(mixer, inputs, alone),
                self.tolerance,
            )

    def test_compile(self, configuration: Configuration) -> None:
        if not self.compiles:
            pytest.skip("switched off for this mixer")
        mixer = self.build(configuration)
        inputs = self.inputs(mixer, configuration, 2, self.lengths[-1])
        eager = self.with_gradients(mixer, inputs, self.run(mixer, inputs))
        torch.compiler.reset()
        compiled = torch.compile(mixer, **self.compile_options)
        assert_all_close(
            "compiled", self.with_gradients(mixer, inputs, self.run(compiled, inputs)), eager, self.tolerance
        )
        torch.compiler.reset()

    # Numbers

    def test_float32(self, configuration: Configuration) -> None:
        single = self.build(configuration, torch.float32)
        inputs = self.inputs(single, configuration, 2, max(self.lengths))
        actual = self.with_gradients(single, inputs, self.run(single, inputs))
        double = self.build(configuration, torch.float32).double()
        wide = inputs.map(lambda tensor: tensor.detach().double().requires_grad_())
        expected = self.with_gradients(double, wide, self.run(double, wide))
        for name, value in expected.items():
            assert relative_error(actual[name], value) <= self.float32_tolerance, f"float32, {name}: off by more"

    def test_gradients_are_derivatives(self, configuration: Configuration) -> None:
        if not self.differentiable:
            pytest.skip("the gradient of this mixer is not meant to be the derivative")
        mixer = self.build(configuration)
        inputs = self.inputs(mixer, configuration, 2, max(self.lengths))
        leaves = {**inputs.named(), **dict(mixer.named_parameters())}
        gradients = self.with_gradients(mixer, inputs, self.run(mixer, inputs))
        step = 1e-6
        with torch.no_grad():
            for name, leaf in leaves.items():
                direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(2)).to(leaf.dtype)
                values = []
                for sign in (1, -2, 1):
                    leaf += sign * step * direction
                    values.append(self.weighted(self.run(mixer, inputs)))
                derivative = (values[0] - values[1]) / (2 * step)
                claimed = (gradients.get(f"gradient of {name}", torch.zeros(())) * direction).sum()
                assert torch.isclose(claimed, derivative, rtol=1e-4, atol=1e-4), (
                    f"{name}: the gradient says {claimed:.6g}, the difference quotient {derivative:.6g}"
                )

    def test_bfloat16(self, configuration: Configuration) -> None:
        half = self.build(configuration, torch.bfloat16)
        inputs = self.inputs(half, configuration, 2, max(self.lengths))
        single = self.build(configuration, torch.bfloat16).float()
        expected = self.run(single, inputs.map(lambda tensor: tensor.detach().float()))
        results = {"bfloat16 weights": self.run(half, inputs)}
        with torch.autocast("cpu", torch.bfloat16):
            results["autocast"] = self.run(single, inputs)
        assert results["bfloat16 weights"].dtype == torch.bfloat16
        for name, output in results.items():
            error = relative_error(output, expected)
            assert error <= self.bfloat16_tolerance, f"{name}: off by {error:.3g} of float32"
            gradients = torch.autograd.grad(output.float().square().sum(), list(inputs.named().values()))
            assert all(gradient.isfinite().all() for gradient in gradients), f"{name}: gradients are not finite"

    def test_uninitialised_memory(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        length = max(self.lengths)
        inputs = self.inputs(mixer, configuration, 1, length)
        expected = self.with_gradients(mixer, inputs, self.run(mixer, inputs))
        with poisoned_memory():
            poisoned = self.with_gradients(mixer, inputs, self.run(mixer, inputs))
            assert_all_close("with NaN in uninitialised memory", poisoned, expected, self.tolerance)
            if "packed" in mixer.capabilities:
                packed = self.run(mixer, inputs, cu_seqlens=_borders([length]))
                assert_close("packed, with NaN in uninitialised memory", packed, expected["output"], self.tolerance)
            if "decode" in mixer.capabilities:
                with torch.no_grad():
                    pieces = self.run_pieces(mixer, inputs, [length - 1, 1], length + 3)
                assert_close("decoding, with NaN in uninitialised memory", pieces, expected["output"], self.tolerance)

    # Costs

    def test_state_bytes(self, configuration: Configuration) -> None:
        self.require(configuration, "decode")
        for dtype in (torch.float32, torch.bfloat16):
            mixer = self.build(configuration, dtype)
            for length in self.lengths:
                inputs = self.inputs(mixer, configuration, 2, length)
                state = mixer.init_state(2, length, "cpu", dtype)
                with torch.no_grad():
                    for t in range(length):
                        self.run(mixer, inputs.map(lambda tensor, at=t: tensor[:, at : at + 1]), state=state)
                real, claimed = sum(_storages(state).values()) / 2, mixer.state_bytes(length, dtype)
                assert real == claimed, f"T={length}, {dtype}: the state takes {real} bytes, state_bytes says {claimed}"

    def test_flops(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        layers = sum(2 * layer.weight.numel() for layer in mixer.modules() if isinstance(layer, nn.Linear))
        before = 0.0
        for length in sorted({*self.lengths, 1000, 100_000}):
            forward, training = mixer.flops_per_token(length), mixer.flops_per_token(length, training=True)
            assert 0 < forward < math.inf, f"T={length}: {forward} operations a token"
            assert forward >= layers, f"T={length}: {forward} operations, fewer than {layers} of the linear layers"
            assert forward >= 0.9 * before, f"T={length}: fewer operations a token than for a shorter sequence"
            assert forward < training <= 4 * forward, f"T={length}: training takes {training}, forward {forward}"
            before = forward

    # State, refusals, parameters

    @torch.no_grad()
    def test_states_are_independent(self, configuration: Configuration) -> None:
        self.require(configuration, "decode")
        mixer = self.build(configuration)
        length = max(self.lengths)
        sequences = [self.inputs(mixer, configuration, 2, length, seed) for seed in (0, 1)]
        expected = [self.run(mixer, inputs) for inputs in sequences]
        states = [mixer.init_state(2, length, "cpu", torch.float64) for _ in sequences]
        outputs: list[list[Tensor]] = [[], []]
        for t in range(length):
            for index, inputs in enumerate(sequences):
                token = inputs.map(lambda tensor, at=t: tensor[:, at : at + 1].clone())
                outputs[index].append(self.run(mixer, token, state=states[index]).clone())
                token.map(lambda tensor: tensor.fill_(math.nan))
        shared = _storages(states[0]).keys() & _storages(states[1]).keys()
        assert not shared, "two states share memory"
        for index in (0, 1):
            actual = torch.cat(outputs[index], dim=1)
            assert_close("two sequences decoded in turn", actual, expected[index], self.tolerance)

    def test_refusals(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        assert mixer.capabilities <= set(CAPABILITIES), (
            f"unknown capabilities {set(mixer.capabilities) - set(CAPABILITIES)}"
        )
        inputs = self.inputs(mixer, configuration, 1, 2)
        if "decode" in mixer.capabilities:
            assert isinstance(mixer.init_state(1, 2, "cpu", torch.float64), MixerState)
        else:
            _refuses("init_state without 'decode'", mixer.init_state, 1, 2, "cpu", torch.float64)
            _refuses("state_bytes without 'decode'", mixer.state_bytes, 2)
        if "packed" not in mixer.capabilities:
            _refuses("cu_seqlens without 'packed'", self.run, mixer, inputs, cu_seqlens=_borders([1, 1]))
        elif "decode" in mixer.capabilities:
            state = mixer.init_state(1, 2, "cpu", torch.float64)
            _refuses("a state with cu_seqlens", self.run, mixer, inputs, state=state, cu_seqlens=_borders([1, 1]))
        if "entropy" not in mixer.capabilities:
            assert mixer.attention_entropy(inputs.x) is None, "attention_entropy without 'entropy' is not None"
        _refuses("layer_idx beyond n_layers", self.mixer, self.d_model, 3, 3, **configuration)

    def test_value_residual(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        inputs = self.inputs(mixer, configuration, 2, max(self.lengths))
        if not mixer.value_residual:
            assert isinstance(mixer(inputs.x), Tensor)
            return
        first = self.build(configuration, layer_idx=0)
        output, v_first = first(inputs.x, v_first=None)
        assert output.shape == inputs.x.shape
        assert v_first.shape[:2] == inputs.x.shape[:2], f"the first layer returns v_first of {tuple(v_first.shape)}"
        output, passed_on = mixer(inputs.x, v_first=inputs.v_first)
        assert passed_on.equal(inputs.v_first), "a later layer changes v_first"
        assert "gradient of v_first" in self.with_gradients(mixer, inputs, output), "v_first has no influence"

    def test_every_parameter_has_a_gradient(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        inputs = self.inputs(mixer, configuration, 2, max(self.lengths))
        found = self.with_gradients(mixer, inputs, self.run(mixer, inputs))
        for name, _ in mixer.named_parameters():
            gradient = found.get(f"gradient of {name}")
            assert gradient is not None, f"{name} has no gradient"
            assert gradient.any(), f"the gradient of {name} is zero"

    def test_reset_parameters(self, configuration: Configuration) -> None:
        def reset(mixer: Mixer) -> dict[str, Tensor]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(7)
                mixer.reset_parameters()
            return {name: tensor.clone() for name, tensor in mixer.state_dict().items()}

        with poisoned_memory():
            fresh = self.mixer(self.d_model, 1, 3, **configuration)
            assert all(tensor.isfinite().all() for tensor in fresh.state_dict().values()), (
                "left uninitialised when built"
            )
            with torch.device("meta"):
                later = self.mixer(self.d_model, 1, 3, **configuration)
            later.to_empty(device="cpu")
        expected, again, materialised = reset(fresh), reset(fresh), reset(later)
        for name, tensor in expected.items():
            assert torch.equal(again[name], tensor), f"{name} differs under the same seed"
            assert torch.equal(materialised[name], tensor), f"{name} is not set by reset_parameters (built on meta)"
        inputs = self.inputs(fresh, configuration, 2, max(self.lengths))
        assert torch.equal(self.run(fresh, inputs), self.run(later, inputs)), "a buffer is not set by reset_parameters"

    def test_entropy(self, configuration: Configuration) -> None:
        self.require(configuration, "entropy")
        mixer = self.build(configuration)
        for length in self.lengths:
            inputs = self.inputs(mixer, configuration, 2, length)
            entropy = mixer.attention_entropy(inputs.x)
            assert isinstance(entropy, Tensor), "attention_entropy is None although 'entropy' is claimed"
            assert entropy.dim() == 3, f"T={length}: {entropy.dim()} dimensions, not [B, T, H]"
            assert entropy.shape[:2] == (2, length), f"T={length}: shape {tuple(entropy.shape)}, not [B, T, H]"
            assert entropy.min() >= -1e-6, f"T={length}: below 0"
            excess = entropy - torch.arange(1, length + 1).log()[:, None]
            assert excess.max() <= 1e-5, f"T={length}: above the logarithm of the number of keys"
        if "packed" in mixer.capabilities:
            x = self.inputs(mixer, configuration, 1, sum(self.lengths)).x
            packed: Any = mixer.attention_entropy(x, cu_seqlens=_borders(self.lengths))
            alone: list[Any] = [mixer.attention_entropy(document) for document in x.split(self.lengths, dim=1)]
            assert_close("entropy of packed documents", packed, torch.cat(alone, dim=1), 1e-5)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of `expected`."""
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return (difference / expected.double().square().mean().sqrt().clamp_min(1e-3)).item()


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """The root mean square of the difference is at most `tolerance`, times that of `expected` where it exceeds 1."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    bound = tolerance * expected.double().square().mean().sqrt().clamp_min(1.0)
    assert difference <= bound, f"{name}: off by {difference:.3g}, more than {bound:.3g}"


def assert_all_close(name: str, actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """`assert_close` for outputs and gradients by name; a missing gradient counts as zero."""
    for key in actual.keys() | expected.keys():
        zero = torch.zeros_like(expected[key] if key in expected else actual[key])
        assert_close(f"{name}: {key}", actual.get(key, zero), expected.get(key, zero), tolerance)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` and its like give NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            settings.fill_uninitialized_memory = fill


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


def _borders(documents: Sequence[int]) -> Tensor:
    return torch.tensor([*_starts(documents), sum(documents)], dtype=torch.int32)


def _replace_from(inputs: Inputs, noise: Inputs, t: int) -> Inputs:
    joined = {
        name: torch.cat((tensor[:, :t], noise.named()[name][:, t:]), dim=1) for name, tensor in inputs.named().items()
    }
    return Inputs(**joined)


def _storages(state: MixerState) -> dict[int, int]:
    """Address and bytes of each block of memory that the state keeps alive."""
    storages = (tensor.untyped_storage() for tensor in state.tensors())
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _refuses(what: str, function: Any, *args: Any, **options: Any) -> None:
    try:
        function(*args, **options)
    except UserError:
        return
    raise AssertionError(f"{what} is not refused with a UserError")
