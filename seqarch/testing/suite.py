"""The tests that every mixer passes."""

import inspect
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqarch.mixers.base import CAPABILITIES, Losses, Mixer, MixerState, Scale
from seqarch.mixers.pieces import waits
from seqarch.testing.compare import (
    assert_all_close,
    assert_close,
    assert_near,
    axes_of,
    poisoned_memory,
    refuses,
    relative_error,
)
from seqarch.testing.cures import with_cures
from seqarch.testing.harness import Configuration, MixerHarness, borders, replaced_from_each, storages

HEADS = ("row", "position", "head")


@with_cures
class MixerSuite(MixerHarness):
    """Tests that every mixer passes; subclass it, name the class `Test...`, set `mixer` and `options`.

    The ways of running a mixer are compared in float64, where only a mistake makes a difference. All parameters are
    moved away from their initial values, so that a projection that starts at zero hides nothing.
    """

    # Shapes, time and batch

    def test_shape_and_dtype(self, configuration: Configuration) -> None:
        for dtype in (torch.float32, torch.float64):
            mixer = self.build(configuration, dtype)
            for length, inputs in self.of_each_length(mixer, configuration):
                before = inputs.x.detach().clone()
                output = self.run(mixer, inputs)
                assert isinstance(output, Tensor), f"T={length}: a {type(output).__name__}, not a tensor"
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
            # one pass for all places: a batch of them is as fast as one
            changed = replaced_from_each(inputs, noise)
            for t, other in enumerate(self.run(mixer, changed).split(2), start=1):
                name = f"outputs before {t} when the input from {t} on changes"
                assert_close(name, other[:, :t], output[:, :t], self.tolerance)
            for t in self.lengths:
                prefix = self.run(mixer, inputs.map(lambda tensor, end=t: tensor[:, :end]))
                assert_close(f"the first {t} outputs without what follows", prefix, output[:, :t], self.tolerance)

    def test_batch_permutation(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        for length, inputs in self.of_each_length(mixer, configuration, 3):
            output = self.run(mixer, inputs)
            for rows in ([2, 0, 1], [1]):
                chosen = self.run(mixer, inputs.map(lambda tensor, index=rows: tensor[index]))
                assert_close(f"T={length}, rows {rows} of the batch", chosen, output[rows], self.tolerance)

    def test_train_and_eval_agree(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        for length, inputs in self.of_each_length(mixer, configuration):
            trained = self.with_gradients(mixer.train(), inputs, self.run(mixer, inputs))
            evaluated = self.with_gradients(mixer.eval(), inputs, self.run(mixer, inputs))
            assert_all_close(f"T={length}, eval()", evaluated, trained, self.tolerance)

    # Ways of running

    def test_pieces_with_gradients(self, configuration: Configuration) -> None:
        mixer = self.require(configuration, "decode")
        for length, inputs in self.of_each_length(mixer, configuration):
            whole = self.with_gradients(mixer, inputs, self.run(mixer, inputs))
            for pieces in self.splits(length)[length == max(self.lengths) :]:  # token by token costs most
                split = self.with_gradients(mixer, inputs, self.run_pieces(mixer, inputs, pieces))
                assert_all_close(f"T={length} in pieces {pieces}", split, whole, self.tolerance)

    @torch.no_grad()
    def test_pieces_without_gradients(self, configuration: Configuration) -> None:
        mixer = self.require(configuration, "decode")
        for length, inputs in self.of_each_length(mixer, configuration):
            whole = self.run(mixer, inputs)
            for pieces, room in zip(self.splits(length), (5, 0, 5), strict=False):
                split = self.run_pieces(mixer, inputs, pieces, length + room)
                name = f"T={length} in pieces {pieces}, max_length {length + room}, no gradients"
                assert_close(name, split, whole, self.tolerance)

    def test_two_processes_share_a_sequence(self, configuration: Configuration) -> None:
        mixer = self.require(configuration, "decode")
        for length in {2, max(self.lengths) // 2 * 2}:
            inputs = self.inputs(mixer, configuration, 2, length)
            whole, shared = self.run(mixer, inputs), self.run_shared(mixer, inputs)
            self.assert_same(f"T={length} shared by two processes", mixer, inputs, shared, whole)

    def test_processes_share_packed_documents(self, configuration: Configuration) -> None:
        self.require(configuration, "packed")
        mixer = self.require(configuration, "decode")
        if waits(mixer):
            pytest.skip(f"{self.mixer.__name__} has no state that splits (MixerState.split)")
        quarter = max(self.lengths) // 4
        most, part = 2 * quarter, quarter // 3
        # one ends where a piece ends, one is empty, one is longer than a piece, one crosses the middle by a token
        for processes, documents in ((4, (quarter, 0, part, most, quarter - part)), (2, (most + 1, most - 1))):
            inputs = self.inputs(mixer, configuration, 1, sum(documents))
            alone = self.run_documents(mixer, inputs, documents)
            shared = self.run_shared(mixer, inputs, processes, borders(documents))
            self.assert_same(f"documents of {documents} shared by {processes} processes", mixer, inputs, shared, alone)

    def test_packed_documents(self, configuration: Configuration) -> None:
        mixer = self.require(configuration, "packed")
        for documents in (self.lengths, self.lengths[::-1], (max(self.lengths),)):
            inputs = self.inputs(mixer, configuration, 1, sum(documents))
            packed = self.run(mixer, inputs, cu_seqlens=borders(documents))
            alone = self.run_documents(mixer, inputs, documents)
            self.assert_same(f"documents of {documents} packed", mixer, inputs, packed, alone)

    def test_compile(self, configuration: Configuration) -> None:
        if not self.compiles:
            pytest.skip("switched off for this mixer")
        mixer = self.build(configuration)
        inputs = self.inputs(mixer, configuration, 2, self.lengths[-1])
        torch.compiler.reset()
        compiled = torch.compile(mixer, **self.compile_options)
        self.assert_same("compiled", mixer, inputs, self.run(compiled, inputs), self.run(mixer, inputs))
        torch.compiler.reset()

    def test_activation_checkpointing(self, configuration: Configuration) -> None:
        mixer, inputs = self.drawn(configuration)
        again = checkpoint(lambda: self.run(mixer, inputs), use_reentrant=False)
        self.assert_same("with activation checkpointing", mixer, inputs, again, self.run(mixer, inputs))

    # Numbers

    def test_float32(self, configuration: Configuration) -> None:
        single, inputs = self.drawn(configuration, torch.float32)
        # gradients of the size that a mean over a batch gives them
        actual = self.with_gradients(single, inputs, self.run(single, inputs), size=2.0**-20)
        double = self.build(configuration, torch.float32).double()
        wide = inputs.map(lambda tensor: tensor.detach().double().requires_grad_())
        expected = self.with_gradients(double, wide, self.run(double, wide))
        for name, value in expected.items():
            assert_near(f"float32: {name}", actual[name], value, self.float32_tolerance, axes_of(name))

    def test_gradients_are_derivatives(self, configuration: Configuration) -> None:
        if not self.differentiable:
            pytest.skip("the gradient of this mixer is not meant to be the derivative")
        mixer, inputs = self.drawn(configuration)
        leaves = self.leaves(mixer, inputs)
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
                both = f"{claimed:.6g}, the difference quotient {derivative:.6g} (bound 1e-4)"
                assert torch.isclose(claimed, derivative, rtol=1e-4, atol=1e-4), f"{name}: the gradient says {both}"

    def test_bfloat16(self, configuration: Configuration) -> None:
        half, inputs = self.drawn(configuration, torch.bfloat16)
        single = self.build(configuration, torch.bfloat16).float()
        wide = inputs.map(lambda tensor: tensor.detach().float().requires_grad_())
        expected = self.with_gradients(single, wide, self.run(single, wide))
        outputs = {"bfloat16 weights": (half, self.run(half, inputs))}
        with torch.autocast("cpu", torch.bfloat16):
            outputs["autocast"] = single, self.run(single, inputs)
        assert outputs["bfloat16 weights"][1].dtype == torch.bfloat16
        for name, (mixer, output) in outputs.items():
            found = self.with_gradients(mixer, inputs, output)
            assert_near(f"{name} next to float32", output, expected["output"], self.bfloat16_tolerance)
            assert found.keys() == expected.keys(), f"{name}: no {min(expected.keys() ^ found.keys())}"
            assert all(each.isfinite().all() for each in found.values()), f"{name}: gradients are not finite"

    @torch.no_grad()
    def test_bfloat16_state(self, configuration: Configuration) -> None:
        self.require(configuration, "decode")
        half = self.build(configuration, torch.bfloat16)
        if half.state_bytes(1) != half.state_bytes(2):
            pytest.skip("the state keeps tokens and accumulates nothing")
        inputs = self.inputs(half, configuration, 2, 200)
        single = self.build(configuration, torch.bfloat16).float()
        expected = self.run(single, inputs.map(lambda tensor: tensor.float()))[:, 150:]
        outputs = self.run(half, inputs), self.run_pieces(half, inputs, [1] * 200)
        whole, decoded = (relative_error(output[:, 150:], expected) for output in outputs)
        bound = 1.5 * max(whole, 0.002)
        error = f"after 150 tokens decoding is off by {decoded:.2g} of float32, the whole sequence by {whole:.2g}"
        assert decoded <= bound, f"{error}; the bound for decoding is {bound:.2g}"

    def test_uninitialised_memory(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        length = max(self.lengths)
        inputs = self.inputs(mixer, configuration, 1, length)
        expected = self.with_gradients(mixer, inputs, self.run(mixer, inputs))
        with poisoned_memory():
            poisoned = self.with_gradients(mixer, inputs, self.run(mixer, inputs))
            assert_all_close("with NaN in uninitialised memory", poisoned, expected, self.tolerance)
            if "packed" in mixer.capabilities:
                packed = self.run(mixer, inputs, cu_seqlens=borders([length]))
                assert_close("packed, with NaN in uninitialised memory", packed, expected["output"], self.tolerance)
            if "decode" in mixer.capabilities:
                with torch.no_grad():
                    pieces = self.run_pieces(mixer, inputs, [length - 1, 1], length + 3)
                assert_close("decoding, with NaN in uninitialised memory", pieces, expected["output"], self.tolerance)

    # Costs

    def test_state_bytes(self, configuration: Configuration) -> None:
        self.require(configuration, "decode")
        for dtype, way in ((torch.float32, 0), (torch.bfloat16, -1)):  # token by token, and in longer pieces
            mixer = self.build(configuration, dtype)
            for length, inputs in self.of_each_length(mixer, configuration):
                state = mixer.init_state(2, length, "cpu", dtype)
                pieces = self.splits(length)[way or length == max(self.lengths)]  # token by token costs most
                with torch.no_grad():
                    for piece in inputs.cut(pieces):
                        self.run(mixer, piece, state=state)
                real, claimed = sum(storages(state).values()) / 2, mixer.state_bytes(length, dtype)
                assert real == claimed, f"T={length}, {dtype}: the state takes {real} bytes, state_bytes says {claimed}"

    def test_flops(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        if mixer.flops_counted:
            pytest.skip(f"{self.mixer.__name__} defines no flops_per_token: they are counted")
        layers = sum(2 * layer.weight.numel() for layer in mixer.modules() if isinstance(layer, nn.Linear))
        before = 0.0
        for length in sorted({*self.lengths, 1000, 100_000}):
            forward, training = mixer.flops_per_token(length), mixer.flops_per_token(length, training=True)
            assert 0 < forward < math.inf, f"T={length}: {forward} operations per token"
            assert forward >= layers, f"T={length}: {forward} operations, fewer than {layers} of the linear layers"
            assert forward >= 0.9 * before, f"T={length}: fewer operations per token than for a shorter sequence"
            assert forward < training <= 4 * forward, f"T={length}: training takes {training}, forward {forward}"
            before = forward

    # State, refusals, parameters

    @torch.no_grad()
    def test_states_are_independent(self, configuration: Configuration) -> None:
        mixer = self.require(configuration, "decode")
        length = max(self.lengths)
        sequences = [self.inputs(mixer, configuration, 2, length, seed) for seed in (0, 1)]
        expected = [self.run(mixer, inputs) for inputs in sequences]
        states = [mixer.init_state(2, length, "cpu", torch.float64) for _ in sequences]
        outputs: list[list[Tensor]] = [[], []]
        tokens = min(length, self.piece + 1)  # then in pieces, of which a state must keep no view either
        rest = self.splits(length - tokens)[1]
        for pieces in zip(*(inputs.cut([1] * tokens + rest) for inputs in sequences), strict=True):
            for index, inputs in enumerate(pieces):
                piece = inputs.map(lambda tensor: tensor.clone())
                outputs[index].append(self.run(mixer, piece, state=states[index]).clone())
                piece.map(lambda tensor: tensor.fill_(math.nan))
        assert not storages(states[0]).keys() & storages(states[1]).keys(), "two states share memory"
        for index in (0, 1):
            actual = torch.cat(outputs[index], dim=1)
            assert_close("two sequences decoded in turn", actual, expected[index], self.tolerance)

    def test_refusals(self, configuration: Configuration) -> None:
        mixer = self.build(configuration)
        assert not (strange := set(mixer.capabilities) - set(CAPABILITIES)), f"unknown capabilities {strange}"
        options = inspect.signature(self.mixer).parameters
        scales, published = (vars(self.mixer).get(name, {}) for name in ("scales", "published"))  # not inherited ones
        named = {name for name in {*scales}.union(*published.values()) if name.split(".")[0] not in options}
        assert not (odd := named | {*scales.values()} - {*get_args(Scale)}), f"unknown in scales or published: {odd}"
        inputs = self.inputs(mixer, configuration, 1, 2)
        for capability, argument in (("decode", "state"), ("packed", "cu_seqlens")):
            assert capability not in mixer.capabilities or argument in mixer.takes, f"forward takes no {argument}"
        if "decode" in mixer.capabilities:
            state = mixer.init_state(3, 2, "cpu", torch.float64)
            assert isinstance(state, MixerState), f"init_state returned a {type(state).__name__}, not a MixerState"
            assert {each.shape[:1] for each in state.tensors()} <= {(3,), ()}, "a state's tensor is not [B, ...]"
        else:
            refuses("init_state without 'decode'", mixer.init_state, 1, 2, "cpu", torch.float64)
            refuses("state_bytes without 'decode'", mixer.state_bytes, 2)
        if "packed" not in mixer.capabilities:
            refuses("cu_seqlens without 'packed'", self.run, mixer, inputs, cu_seqlens=borders([1, 1]))
            if "cu_seqlens" in mixer.takes:
                refuses("cu_seqlens without 'packed'", mixer, inputs.x, cu_seqlens=borders([1, 1]))
        if "entropy" not in mixer.capabilities:
            assert mixer.attention_entropy(inputs.x) is None, "attention_entropy without 'entropy' is not None"
        refuses("layer_idx beyond n_layers", self.mixer, self.d_model, 3, 3, **configuration)

    def test_carry(self, configuration: Configuration) -> None:
        mixer, inputs = self.drawn(configuration)
        if not inputs.carry:
            pytest.skip(f"{self.mixer.__name__} hands nothing to later layers")
        before = inputs.map(lambda tensor: tensor.detach().clone()).carry
        output = self.with_gradients(mixer, inputs, self.run(mixer, inputs))
        for name, tensor in inputs.carry.items():
            assert tensor.shape[:2] == inputs.x.shape[:2], f"the carry {name} is {tuple(tensor.shape)}, not [B, T, ...]"
            assert torch.equal(tensor, before[name]), f"the carry {name} is written in place"
            assert f"gradient of {name}" in output, f"the carry {name} has no influence"

    def test_losses(self, configuration: Configuration) -> None:
        mixer, inputs = self.drawn(configuration)
        if "losses" not in mixer.takes:
            pytest.skip(f"{self.mixer.__name__} adds no loss")
        losses: Losses = {}
        torch.manual_seed(0)
        output = self.run(mixer, inputs, losses=losses)
        assert_close("outputs where losses are computed", output, self.run(mixer, inputs), self.tolerance)
        for name, loss in losses.items():
            assert loss.dim() == 0, f"the loss {name} is {tuple(loss.shape)}, not 0-d: take a mean over the tokens"
            assert loss.isfinite(), f"the loss {name} is not finite"
            assert loss.requires_grad, f"the loss {name} has no gradient"
        again: Losses = {}
        torch.manual_seed(0)  # a loss may draw
        twice = inputs.map(lambda tensor: torch.cat((tensor, tensor)))
        self.run(mixer, twice, losses=again)
        for name, loss in losses.items():
            assert_close(f"the loss {name} of the same tokens twice", again[name], loss, self.tolerance)

    def test_every_parameter_has_a_gradient(self, configuration: Configuration) -> None:
        mixer, inputs = self.drawn(configuration)
        losses: Losses = {}
        output = self.run(mixer, inputs, losses=losses)
        found = self.with_gradients(mixer, inputs, output + sum(losses.values()))
        for name in (name for name, each in mixer.named_parameters() if each.requires_grad):
            assert (gradient := found.get(f"gradient of {name}")) is not None, f"{name} has no gradient"
            assert gradient.any(), f"the gradient of {name} is zero"

    def test_reset_parameters(self, configuration: Configuration) -> None:
        def reset(mixer: Mixer) -> dict[str, Tensor]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(7)
                mixer.reset_parameters()
            return {name: tensor.clone() for name, tensor in mixer.state_dict().items()}

        with poisoned_memory():
            fresh = self.mixer(self.d_model, 1, 3, **configuration)
            assert all(each.isfinite().all() for each in fresh.state_dict().values()), "left uninitialised when built"
            with torch.device("meta"):
                later = self.mixer(self.d_model, 1, 3, **configuration)
            if self.mixer.reset_parameters is Mixer.reset_parameters:
                pytest.skip(f"{self.mixer.__name__} defines no reset_parameters: its constructor draws its weights")
            later.to_empty(device="cpu")
        expected, again, materialised = reset(fresh), reset(fresh), reset(later)
        for name, tensor in expected.items():
            assert torch.equal(again[name], tensor), f"{name} differs under the same seed"
            assert torch.equal(materialised[name], tensor), f"{name} is not set by reset_parameters (built on meta)"
        inputs = self.inputs(fresh, configuration, 2, max(self.lengths))
        assert torch.equal(self.run(fresh, inputs), self.run(later, inputs)), "a buffer is not set by reset_parameters"

    def test_entropy(self, configuration: Configuration) -> None:
        mixer = self.require(configuration, "entropy")
        for length, inputs in self.of_each_length(mixer, configuration):
            entropy = mixer.attention_entropy(inputs.x)
            assert isinstance(entropy, Tensor), "attention_entropy is None although 'entropy' is claimed"
            assert (entropy.dim(), *entropy.shape[:2]) == (3, 2, length), f"T={length}: {entropy.shape}, not [B, T, H]"
            assert entropy.min() >= -1e-6, f"T={length}: below 0"
            excess = entropy - torch.arange(1, length + 1).log()[:, None]
            assert excess.max() <= 1e-5, f"T={length}: above the logarithm of the number of keys"
        if "packed" in mixer.capabilities:
            x = self.inputs(mixer, configuration, 1, sum(self.lengths)).x
            packed: Any = mixer.attention_entropy(x, cu_seqlens=borders(self.lengths))
            alone: list[Any] = [mixer.attention_entropy(document) for document in x.split(self.lengths, dim=1)]
            assert_close("entropy of packed documents", packed, torch.cat(alone, dim=1), 1e-5, HEADS)
