import pytest
import torch
from torch._inductor import metrics

from seqarch.mixers.token_shift import TokenShiftState, token_shift


def test_the_state_holds_the_last_token_in_its_own_dtype():
    state = TokenShiftState.empty(2, 3, "cpu", torch.bfloat16)
    x = torch.randn(2, 4, 3)
    shifted = token_shift(x, state=state)
    assert shifted.dtype == torch.float32
    assert torch.equal(shifted, torch.cat((torch.zeros(2, 1, 3), x[:, :-1]), dim=1))
    assert torch.equal(token_shift(x), shifted)
    assert state.last.dtype == torch.bfloat16
    assert torch.equal(token_shift(x, state=state)[:, 0], x[:, -1].bfloat16().float())


@pytest.mark.no_cover
def test_the_compiler_makes_one_kernel_of_a_shift_and_what_follows():
    def mixed(x, first, second):
        delta = token_shift(x) - x
        return torch.addcmul(x, delta, first), torch.addcmul(x, delta, second)

    arguments = torch.randn(2, 8, 16), torch.rand(16), torch.rand(16)
    torch.compiler.reset()
    metrics.reset()
    for compiled, plain in zip(torch.compile(mixed)(*arguments), mixed(*arguments), strict=True):
        torch.testing.assert_close(compiled, plain)
    assert metrics.generated_kernel_count == 1
