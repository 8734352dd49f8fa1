"""On a GPU: for every mixer, the captured step draws the same tokens as the step from Python."""

import warnings

import pytest
import torch

from seqarch.errors import SeqarchWarning
from seqarch.model import generate, with_bf16_weights
from tests.model.test_generation import MIXERS, PATTERNS, build, tokens

pytestmark = pytest.mark.gpu


def drawn(lm, **options):
    prompts = [tokens(length, seed=length).cuda() for length in (70, 61, 66)]
    generator = torch.Generator("cuda").manual_seed(0)
    return generate(lm, prompts, 30, temperature=0.8, top_p=0.9, generator=generator, **options)


@pytest.mark.parametrize("name", [*MIXERS, *PATTERNS])
def test_a_captured_step_draws_what_python_draws(name):
    lm = with_bf16_weights(build(name, dtype=torch.float32).cuda())
    wanted = drawn(lm, capture=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SeqarchWarning)  # that a step cannot be captured
        found = drawn(lm, capture=True)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("name", ["Attention, window", "Top1Chunk, approx", "RWKV7", "Mamba2"])
@torch.no_grad()
def test_compiled_passes_and_steps_are_the_plain_ones(name):
    lm = build(name, dtype=torch.float32).cuda()
    options = {"temperature": 0, "prefill_chunk": 32}
    prompts = [tokens(70, seed=1).cuda()]
    wanted, found = (generate(lm, prompts, 20, compiled=each, **options)[0] for each in (False, True))
    assert (found == wanted)[:5].all()  # later, roundings lead to different tokens
