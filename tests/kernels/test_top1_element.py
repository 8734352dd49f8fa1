"""Top-1 element attention: the straight-through gradient and ties."""

import torch

from seqarch.kernels import top1_element_attention
from tests.kernels import naive


def test_straight_through_gradient_by_its_formula():
    """dP = dO V^T, dS = P (dP - rowsum(P dP)); dV gathers dO only at the selected keys."""
    q, k, v = draw = naive.draw(B=1, Tq=50, H=1, D=8)
    do = torch.randn(1, 50, 1, 8, dtype=torch.float64)
    dq, dk, dv = torch.autograd.grad(top1_element_attention(q, k, v, scale=0.7), draw, do)
    p = naive.probabilities(q, k, scale=0.7)[0, 0]
    dp = do[0, :, 0] @ v[0, :, 0].T
    ds = 0.7 * p * (dp - (p * dp).sum(-1, keepdim=True))
    selected = torch.eye(50, dtype=torch.float64)[p.argmax(-1)]
    naive.assert_close(dq[0, :, 0], ds @ k[0, :, 0])
    naive.assert_close(dk[0, :, 0], ds.T @ q[0, :, 0])
    naive.assert_close(dv[0, :, 0], selected.T @ do[0, :, 0])


def test_the_output_is_one_value_exactly():
    q, k, v = (t.detach().float() for t in naive.draw(B=1, Tq=50, H=1))
    o = top1_element_attention(q, k, v)
    best = naive.probabilities(q.double(), k.double())[0, 0].argmax(-1)
    assert torch.equal(o[0, :, 0], v[0, best, 0])


def test_equal_scores_go_to_the_first_key():
    q, k, v = naive.draw(Tq=20)
    o = top1_element_attention(q, torch.ones_like(k), v)
    naive.assert_close(o, v[:, :1].expand_as(v))
