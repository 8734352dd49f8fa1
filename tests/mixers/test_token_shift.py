import pytest
import torch
from torch._inductor import cpu_vec_isa, metrics
from torch._inductor.async_compile import AsyncCompile

from seqarch.mixers.short_convolution import ShortConvolutionState
from seqarch.mixers.token_shift import token_shift


def test_the_state_holds_the_last_token_in_its_own_dtype():
    state = ShortConvolutionState.empty(2, 1, 3, "cpu", torch.bfloat16)
    x = torch.randn(2, 4, 3)
    shifted = token_shift(x, state=state)
    assert shifted.dtype == torch.float32
    assert torch.equal(shifted, torch.cat((torch.zeros(2, 1, 3), x[:, :-1]), dim=1))
    assert torch.equal(token_shift(x), shifted)
    assert state.last.dtype == torch.bfloat16
    assert torch.equal(token_shift(x, state=state)[:, 0], x[:, -1].bfloat16().float())


@pytest.mark.no_cover
def test_the_compiler_makes_one_kernel_of_a_shift_and_what_follows(monkeypatch):
    """Counted in what Inductor generates; no C++ compiler runs."""
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)

    def mixed(x, first, second):
        delta = token_shift(x) - x
        return torch.addcmul(x, delta, first), torch.addcmul(x, delta, second)

    torch.compiler.reset()
    metrics.reset()
    torch.compile(mixed)(torch.randn(2, 8, 16), torch.rand(16), torch.rand(16))
    assert metrics.generated_kernel_count == 1
