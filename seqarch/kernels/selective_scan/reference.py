"""The selective scan in plain PyTorch: token by token as the definition, and in pieces with gradients of our own.

Each piece keeps one state, and the backward pass computes the states of a piece again. So memory is linear in T, plus
the states of one piece.
"""

import math
from typing import Any

import torch
from torch import Tensor

from seqarch.kernels.launch import gradient_of, operator
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import Recurred, state_or_zeros

PIECE_ELEMENTS = 2**18
"""Elements of the states of one piece, of which three copies live at once: a CPU's cache should hold them."""


def selective_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Recurred:

    def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, log_decay: Any, state: Any) -> Recurred:
        first = state_or_zeros(state, x, x.shape[0], x.shape[2], B.shape[2])
        scan = scan_recurrent if x.shape[1] == 1 else scan_pieces
        y, final, *_ = scan(x, dt, A, B, C, log_decay, first)
        return (y if D is None else torch.addcmul(y, x.to(y.dtype), D.to(y.dtype))).to(x.dtype), final

    return each_document(run, (x, dt, B, C, log_decay), initial_state, cu_seqlens)


def scan_recurrent(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, log_decay: Tensor | None, h: Tensor
) -> Recurred:
    """One step per token, with autograd's own gradients: outputs without `D`, and the final state."""
    wide = _wide(x)
    outputs = []
    for t in range(x.shape[1]):
        h = _decay(dt[:, t].to(wide), A, None if log_decay is None else log_decay[:, t]) * h
        h = h + (dt[:, t] * x[:, t]).to(wide).unsqueeze(-1) * B[:, t].to(wide).unsqueeze(1)
        outputs.append((h * C[:, t].to(wide).unsqueeze(1)).sum(-1))
    return torch.stack(outputs, dim=1), h


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _decay(dt: Tensor, A: Tensor | None, log_decay: Tensor | None) -> Tensor:
    """`a_t`, broadcastable to `[..., d, N]`, from `dt [..., d]` or `log_decay [...]`."""
    if A is not None:
        return torch.exp(dt.unsqueeze(-1) * A.to(dt.dtype))
    if log_decay is not None:
        return torch.exp(log_decay.to(dt.dtype))[..., None, None]
    return dt.new_ones((1,) * (dt.dim() + 1))


class _Walk:
    """A walk over a sequence piece by piece, in buffers of one piece: what a method returns is valid until the next.

    States are `[N, d]` here, since rows of d channels vectorise and rows of few states do not.
    """

    def __init__(
        self, x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, log_decay: Tensor | None, size: int
    ) -> None:
        wide = _wide(x)
        self.x, self.dt, self.B, self.C = (t.to(wide) for t in (x, dt, B, C))
        self.u = self.dt * self.x
        self.A = None if A is None else A.t().to(wide).contiguous()
        self.A_log2 = None if self.A is None else self.A / math.log(2)  # exp2 takes half the time of exp
        self.log_decay = None if log_decay is None else log_decay.to(wide)
        self.shape = B.shape[2], x.shape[2]
        self._states, self._gradients, self._decays = self.x.new_empty(3, x.shape[0] * size * math.prod(self.shape))

    def _view(self, buffer: Tensor, at: slice) -> Tensor:
        shape = self.x.shape[0], at.stop - at.start, *self.shape
        return buffer[: math.prod(shape)].view(shape)

    def decays(self, at: slice) -> Tensor:
        """`a_t` of a piece, `[B, L, N, d]` or broadcastable to it."""
        if self.A_log2 is not None:
            return torch.mul(self.dt[:, at].unsqueeze(-2), self.A_log2, out=self._view(self._decays, at)).exp2_()
        if self.log_decay is not None:
            return self.log_decay[:, at].exp()[..., None, None]
        return self.x.new_ones(1, 1, 1, 1).expand(-1, at.stop - at.start, -1, -1)

    def states(self, at: slice, a: Tensor, h: Tensor) -> Tensor:
        """The states after each token of a piece, `[B, L, N, d]`, from the state `h [B, N, d]` before it."""
        states = self._view(self._states, at)
        torch.mul(self.u[:, at].unsqueeze(-2), self.B[:, at].unsqueeze(-1), out=states)
        for a_t, state in zip(a.unbind(1), states.unbind(1), strict=True):
            h = state.addcmul_(a_t, h)
        return states

    def state_gradients(self, at: slice, a: Tensor, dy: Tensor, dh: Tensor) -> Tensor:
        """Gradients of the states after each token, `[B, L, N, d]`; `dh` is what follows the piece adds to the last."""
        gradients = self._view(self._gradients, at)
        torch.mul(dy[:, at].unsqueeze(-2), self.C[:, at].unsqueeze(-1), out=gradients)
        gradients[:, -1] += dh
        steps = gradients.unbind(1)[::-1]
        for a_t, after, before in zip(a.unbind(1)[::-1], steps, steps[1:], strict=False):
            before.addcmul_(a_t, after)
        return gradients


def _pieces(x: Tensor, N: int) -> list[slice]:
    size = min(max(PIECE_ELEMENTS // (max(x.shape[0], 1) * x.shape[2] * N), 8), 64)
    return [slice(start, min(start + size, x.shape[1])) for start in range(0, x.shape[1], size)]


def _empty(x: Tensor, dt: Tensor, A: Any, B: Tensor, C: Tensor, log_decay: Any, h: Tensor) -> tuple[Tensor, ...]:
    before = h.new_empty(len(_pieces(x, B.shape[2])), *h.transpose(1, 2).shape)
    return x.new_empty(x.shape, dtype=h.dtype), h.new_empty(h.shape), before


@operator("seqarch::selective_scan_pieces", _empty)
def scan_pieces(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, log_decay: Tensor | None, h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs without `D`, the final state, and the state before each piece `[pieces, B, N, d]`."""
    pieces = _pieces(x, B.shape[2])
    walk = _Walk(x, dt, A, B, C, log_decay, pieces[0].stop)
    y = h.new_empty(x.shape)
    h = h.transpose(1, 2)
    before = h.new_empty(len(pieces), *h.shape)
    for at, start in zip(pieces, before, strict=True):
        start.copy_(h)
        states = walk.states(at, walk.decays(at), start)
        y[:, at] = (walk.C[:, at].unsqueeze(-2) @ states).squeeze(-2)
        h = states[:, -1]
    return y, h.transpose(1, 2).contiguous(), before


@gradient_of(scan_pieces, gradients=7, outputs=2, keep=[2])
def _backward(dy, dh, x, dt, A, B, C, log_decay, h, before):
    """Gradients of x, dt, A, B, C, log_decay and the initial state."""
    pieces = _pieces(x, B.shape[2])
    walk = _Walk(x, dt, A, B, C, log_decay, pieces[0].stop)
    dx, ddt, dB, dC = (before.new_empty(t.shape) for t in (x, dt, B, C))
    dA = None if A is None else before.new_zeros(A.t().shape)
    dlog = None if log_decay is None else before.new_zeros(log_decay.shape)
    dh = dh.transpose(1, 2)
    for at, start in reversed(list(zip(pieces, before, strict=True))):
        a = walk.decays(at)
        states = walk.states(at, a, start)
        grads = walk.state_gradients(at, a, dy, dh)
        dC[:, at] = (dy[:, at].unsqueeze(-2) @ states.mT).squeeze(-2)
        dB[:, at] = (walk.u[:, at].unsqueeze(-2) @ grads.mT).squeeze(-2)
        du = (walk.B[:, at].unsqueeze(-2) @ grads).squeeze(-2)
        dx[:, at] = du * walk.dt[:, at]
        du *= walk.x[:, at]
        q = grads.mul_(a)  # gradients of the states before each token, to be multiplied by these
        dh = q[:, 0].clone()
        q[:, 1:] *= states[:, :-1]
        q[:, 0] *= start
        if walk.A is not None and dA is not None:
            du += torch.mul(q, walk.A, out=states).sum(-2)
            dA += q.mul_(walk.dt[:, at].unsqueeze(-2)).sum((0, 1))
        elif dlog is not None:
            dlog[:, at] = q.sum((-2, -1))
        ddt[:, at] = du
    return dx, ddt, None if dA is None else dA.t().contiguous(), dB, dC, dlog, dh.transpose(1, 2).contiguous()
