import torch

from seqarch.mixers.token_shift import TokenShiftState, token_shift


def test_the_state_holds_the_last_token_in_its_own_dtype():
    state = TokenShiftState.empty(2, 3, "cpu", torch.bfloat16)
    x = torch.randn(2, 4, 3)
    shifted = token_shift(x, state=state)
    assert shifted.dtype == torch.float32
    assert torch.equal(shifted, torch.cat((torch.zeros(2, 1, 3), x[:, :-1]), dim=1))
    assert state.last.dtype == torch.bfloat16
    assert torch.equal(token_shift(x, state=state)[:, 0], x[:, -1].bfloat16().float())
