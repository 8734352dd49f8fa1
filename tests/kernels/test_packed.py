"""Documents packed into one row: positions, and recurrences over each."""

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import document_positions


def test_positions_restart_at_borders_and_continue_from_a_state() -> None:
    x = torch.empty(1, 6, 1)
    assert document_positions(x).tolist() == [0, 1, 2, 3, 4, 5]
    assert document_positions(x, start=4).tolist() == [4, 5, 6, 7, 8, 9]
    borders = torch.tensor([0, 2, 2, 3, 6], dtype=torch.int32)
    assert document_positions(x, cu_seqlens=borders).tolist() == [0, 1, 0, 0, 1, 2]


def test_positions_refuse_borders_of_another_shape_or_type() -> None:
    for borders in (torch.tensor([[0, 2, 6]], dtype=torch.int32), torch.tensor([0, 2, 6])):
        with pytest.raises(UserError, match=r"cu_seqlens must be int32 \[N \+ 1\], not torch\.int"):
            document_positions(torch.empty(1, 6, 1), cu_seqlens=borders)


def running_sum(x, y, state):
    """The smallest recurrence: outputs and final state are sums of x (and of y where given)."""
    x = x if y is None else x + y
    start = torch.zeros_like(x[:, 0]) if state is None else state
    o = x.cumsum(dim=1) + start[:, None]
    return o, o[:, -1]


def borders(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_each_document_starts_from_its_own_state():
    x = torch.arange(6.0).view(1, 6, 1)
    o, final = each_document(running_sum, (x, None), None, borders(0, 2, 6))
    assert o.flatten().tolist() == [0, 1, 2, 5, 9, 14]
    assert final.tolist() == [[1], [14]]
    o, final = each_document(running_sum, (x, x), torch.tensor([[10.0], [100.0]]), borders(0, 2, 6))
    assert o.flatten().tolist() == [10, 12, 104, 110, 118, 128]
    assert final.tolist() == [[12], [128]]


def test_a_state_may_be_several_tensors():
    def twice(x, state):
        (o, first), (other, second) = (running_sum(x, None, state and state[index]) for index in (0, 1))
        return o + other, (first, second)

    x, start = (
        torch.arange(6.0).view(1, 6, 1),
        (torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0], [20.0], [30.0]])),
    )
    o, (first, second) = each_document(twice, (x,), start, borders(0, 2, 2, 6))
    assert o.flatten().tolist() == [11, 13, 37, 43, 51, 61]
    assert (first.tolist(), second.tolist()) == ([[2], [2], [17]], [[11], [20], [44]])
    assert [t.tolist() for t in each_document(twice, (x,), None, borders(0, 0, 6))[1]] == [[[0], [15]]] * 2


def test_an_empty_document_keeps_its_state():
    x = torch.ones(1, 3, 1)
    initial = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    o, final = each_document(running_sum, (x, None), initial, borders(0, 0, 2, 2, 3))
    assert o.flatten().tolist() == [3, 4, 5]
    assert final.tolist() == [[1], [4], [3], [5]]
    _, final = each_document(running_sum, (x, None), None, borders(0, 0, 2, 2, 3))
    assert final.tolist() == [[0], [2], [0], [1]]


def test_documents_have_the_gradients_that_they_have_alone():
    x = torch.randn(1, 5, 2, requires_grad=True)
    initial = torch.randn(2, 2, requires_grad=True)
    o, final = each_document(running_sum, (x.square(), None), initial, borders(0, 3, 5))
    grad_x, grad_initial = torch.autograd.grad(o.sum() + final.sum(), (x, initial))
    count = torch.tensor([4.0, 3, 2, 3, 2])[:, None]
    torch.testing.assert_close(grad_x[0], 2 * x[0].detach() * count)
    torch.testing.assert_close(grad_initial, torch.tensor([[4.0, 4], [3, 3]]))


def test_borders_that_do_not_cover_the_row_are_refused():
    x = torch.ones(1, 3, 1)
    for wrong in (borders(0, 2), borders(1, 3), borders(0, 3, 2, 3)):
        with pytest.raises(UserError, match="must rise from 0 to T = 3"):
            each_document(running_sum, (x, None), None, wrong)
