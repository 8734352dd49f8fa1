"""Universal halts tokens as the paper says, with a ponder loss; models with it decode what a full pass gives."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from seqarch_zoo.universal import Universal

from seqarch import Experiment
from seqarch.mixers.attention import Attention
from seqarch.model import GeGLU, SequenceLM, generate

ATTENTION: Any = Attention


def model(**options: Any) -> SequenceLM:
    torch.manual_seed(0)
    mixers: Any = {"a": partial(ATTENTION, n_heads=2)}
    lm = SequenceLM(31, 16, 2, mixers, feed_forward=GeGLU, loops=4, looping=partial(Universal, **options))
    for parameter in lm.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return lm.double()


@torch.no_grad()
def test_halting_of_the_paper():
    """Appendix C token by token, with the loop's output in place of the block."""
    torch.manual_seed(0)
    layer = Universal(8, 5, threshold=0.9).double()
    assert layer.halt is not None
    layer.halt.bias.fill_(-1)
    layer.halt.weight.normal_()
    x = torch.randn(2, 30, 8, dtype=torch.float64)
    losses: Any = {}
    found = layer(x, lambda x, loop: torch.tanh(x * (1 + loop)), losses)
    ponder, loops = [], set()
    for b in range(2):
        for t in range(30):
            state, output, total, remainder, updates, halted = x[b, t], torch.zeros(8), 0.0, 0.0, 0, False
            for loop in range(5):
                angles = (loop + 1) * 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
                state = state + torch.cat((angles.sin(), angles.cos()))
                p = layer.halt(state).sigmoid().item()
                weight = 0.0
                if not halted:
                    updates += 1
                    halted = total + p > 0.9
                    weight = 1 - total if halted else p
                    remainder = weight if halted else 0.0
                    total += p
                state = torch.tanh(state * (1 + loop))
                output = weight * state + (1 - weight) * output
            torch.testing.assert_close(found[b, t], output.double(), rtol=1e-6, atol=1e-6)
            ponder.append(updates + remainder)
            loops.add(updates)
    assert len(loops) > 2
    assert losses["ponder"].item() == pytest.approx(0.01 * sum(ponder) / len(ponder), rel=1e-6)


@pytest.mark.parametrize("halting", [True, False])
@torch.no_grad()
def test_generated_text_pieces_and_documents(halting):
    lm = model(halting=halting)
    tokens = torch.randint(0, 31, (1, 20))
    state = lm.init_state(1, 20, "cpu", torch.float64)
    pieces = torch.cat([lm(piece, state=state) for piece in tokens.split(7, dim=1)], dim=1)
    torch.testing.assert_close(pieces, lm(tokens))
    packed = lm(tokens, cu_seqlens=torch.tensor([0, 8, 20], dtype=torch.int32))
    torch.testing.assert_close(packed, torch.cat((lm(tokens[:, :8]), lm(tokens[:, 8:])), dim=1))
    tokens = tokens[:, :5]
    drawn = generate(lm, tokens, 6, temperature=0)[0].tolist()
    for _ in range(6):
        tokens = torch.cat((tokens, lm(tokens)[:, -1:].argmax(-1)), dim=1)
    assert drawn == tokens[0, 5:].tolist()


def test_the_ponder_loss_has_a_gradient_and_a_name():
    lm = model()
    tokens = torch.randint(0, 31, (2, 13))
    plain = lm(tokens[:, :-1], tokens[:, 1:])
    assert not lm.added
    loss = lm(tokens[:, :-1], tokens[:, 1:], added=2.0)
    assert lm.added.keys() == {"ponder"}
    torch.testing.assert_close(loss, plain + lm.added["ponder"])
    (loss - plain).backward()
    assert lm.get_parameter("looping.halt.weight").grad.any()  # pyright: ignore[reportOptionalMemberAccess]


def test_operations_and_parameters_are_counted():
    with_halting, without = model(), model(halting=False)
    assert with_halting.n_parameters() - without.n_parameters() == 17
    assert with_halting.flops_per_token(8) - without.flops_per_token(8) == 4 * 2 * 16


def test_the_recipe_parses_and_its_model_runs():
    lm = Experiment.from_recipe(Path(__file__).parents[1] / "recipes/universal.yaml").model.build()
    assert isinstance(lm.looping, Universal)
    tokens = torch.randint(0, 257, (1, 16))
    assert lm(tokens[:, :-1], tokens[:, 1:]).isfinite()
