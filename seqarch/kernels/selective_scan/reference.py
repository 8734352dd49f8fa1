"""The selective scan in plain PyTorch: token by token for truth, and in pieces with its gradients written out.

The pieces keep one state each; the backward pass computes the states of a piece again, so memory is linear in T with
the states of one piece on top. Tensors are time-major inside, so that the state of a token is one block of memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PIECE_ELEMENTS = 2**20
"""Elements of the states of one piece, of which a few copies live at once."""


def scan_recurrent(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One step a token, with autograd's own gradients; arguments as in `selective_scan`."""
    wide = _wide(x)
    h = _initial(x, B, initial_state)
    outputs = []
    for t in range(x.shape[1]):
        h = _decay(dt[:, t].to(wide), A, None if log_decay is None else log_decay[:, t]) * h
        h = h + (dt[:, t] * x[:, t]).to(wide).unsqueeze(-1) * B[:, t].to(wide).unsqueeze(1)
        outputs.append((h * C[:, t].to(wide).unsqueeze(1)).sum(-1))
    return _output(torch.stack(outputs, dim=1), x, D), h


def scan_pieces(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `scan_recurrent`, faster and with the gradients of `_gradients`."""
    h = _initial(x, B, initial_state)
    y, final, _ = _forward(x, dt, A, B, C, log_decay, h)
    return _output(y, x, D), final


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _initial(x: Tensor, B: Tensor, initial_state: Tensor | None) -> Tensor:
    if initial_state is None:
        return x.new_zeros(x.shape[0], x.shape[2], B.shape[2], dtype=_wide(x))
    return initial_state.to(_wide(x))


def _output(y: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    return (y if D is None else torch.addcmul(y, x.to(y.dtype), D.to(y.dtype))).to(x.dtype)


def _decay(dt: Tensor, A: Tensor | None, log_decay: Tensor | None) -> Tensor:
    """`a_t`, broadcastable to `[..., d, N]`, from `dt [..., d]` or `log_decay [...]`."""
    if A is not None:
        return torch.exp(dt.unsqueeze(-1) * A.to(dt.dtype))
    if log_decay is not None:
        return torch.exp(log_decay.to(dt.dtype))[..., None, None]
    return dt.new_ones((1,) * (dt.dim() + 1))


class _Piece:
    """The tokens of one piece, time-major: `dt, x, u [L, B, d]`, `B, C [L, B, N]`, decays `a` and inputs `b`."""

    def __init__(self, tensors: tuple[Tensor, ...], A: Tensor | None, log_decay: Tensor | None, at: slice) -> None:
        x = tensors[0]
        self.x, self.dt, self.B, self.C = (t[:, at].transpose(0, 1).to(_wide(x)).contiguous() for t in tensors)
        self.u = self.dt * self.x
        self.a = _decay(self.dt, A, None if log_decay is None else log_decay[:, at].transpose(0, 1))
        self.a = self.a.expand(self.x.shape[0], *self.a.shape[1:])
        self.b = self.u.unsqueeze(-1) * self.B.unsqueeze(2)

    def states(self, h: Tensor) -> Tensor:
        """The states after each token, `[L + 1, B, d, N]`, the first that before the piece."""
        states = torch.empty(self.b.shape[0] + 1, *h.shape, dtype=h.dtype, device=h.device)
        states[0] = h
        for t in range(self.b.shape[0]):
            torch.addcmul(self.b[t], self.a[t], states[t], out=states[t + 1])
        return states

    def state_gradients(self, dy: Tensor, dh: Tensor) -> Tensor:
        """Gradients of the states after each token, `[L, B, d, N]`, `dh` that of the last from what follows it."""
        gradients = dy.unsqueeze(-1) * self.C.unsqueeze(2)
        gradients[-1] += dh
        for t in range(gradients.shape[0] - 2, -1, -1):
            gradients[t].addcmul_(self.a[t + 1], gradients[t + 1])
        return gradients


def _pieces(x: Tensor, N: int) -> list[slice]:
    size = min(max(PIECE_ELEMENTS // (x.shape[0] * x.shape[2] * N), 8), 64)
    return [slice(start, min(start + size, x.shape[1])) for start in range(0, x.shape[1], size)]


@torch.library.custom_op("seqarch::selective_scan_pieces", mutates_args=())
def _forward(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, log_decay: Tensor | None, h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs without `D`, the final state, and the state before each piece `[pieces, B, d, N]`."""
    outputs, before = [], []
    for at in _pieces(x, B.shape[2]):
        piece = _Piece((x, dt, B, C), A, log_decay, at)
        before.append(h)
        states = piece.states(h)
        h = states[-1].clone()
        outputs.append((states[1:] @ piece.C.unsqueeze(-1)).squeeze(-1).transpose(0, 1))
    return torch.cat(outputs, dim=1), h, torch.stack(before)


@_forward.register_fake
def _(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, log_decay: Tensor | None, h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=h.dtype), torch.empty_like(h), h.new_empty(len(_pieces(x, B.shape[2])), *h.shape)


@torch.library.custom_op("seqarch::selective_scan_pieces_backward", mutates_args=())
def _backward(
    dy: Tensor,
    dh: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    log_decay: Tensor | None,
    before: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, A, B, C, log_decay and the initial state; empty where there is no such argument."""
    wide = before.dtype
    dx, ddt, dB, dC = (torch.empty_like(t, dtype=wide, memory_format=torch.contiguous_format) for t in (x, dt, B, C))
    dA = before.new_zeros(() if A is None else A.shape)
    dlog = before.new_zeros(() if log_decay is None else log_decay.shape)
    for at, h in reversed(list(zip(_pieces(x, B.shape[2]), before, strict=True))):
        piece = _Piece((x, dt, B, C), A, log_decay, at)
        states = piece.states(h)
        dy_piece = dy[:, at].transpose(0, 1).to(wide)
        grads = piece.state_gradients(dy_piece, dh)
        dC[:, at] = (dy_piece.unsqueeze(2) @ states[1:]).squeeze(2).transpose(0, 1)
        dB[:, at] = (piece.u.unsqueeze(2) @ grads).squeeze(2).transpose(0, 1)
        du = (grads @ piece.B.unsqueeze(-1)).squeeze(-1)
        dx[:, at] = (du * piece.dt).transpose(0, 1)
        ddt_piece = du * piece.x
        through = grads * piece.a  # gradients of the states before each token
        dh = through[0].clone()
        through *= states[:-1]
        if A is not None:
            ddt_piece += (through * A.to(wide)).sum(-1)
            dA += (through * piece.dt.unsqueeze(-1)).sum((0, 1))
        elif log_decay is not None:
            dlog[:, at] = through.sum((2, 3)).transpose(0, 1)
        ddt[:, at] = ddt_piece.transpose(0, 1)
    return dx, ddt, dA, dB, dC, dlog, dh


@_backward.register_fake
def _(
    dy: Tensor,
    dh: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    log_decay: Tensor | None,
    before: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, ddt, dB, dC = (before.new_empty(t.shape) for t in (x, dt, B, C))
    dA, dlog = (before.new_empty(() if t is None else t.shape) for t in (A, log_decay))
    return dx, ddt, dA, dB, dC, dlog, torch.empty_like(dh)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, dt, A, B, C, log_decay, _ = inputs
    ctx.save_for_backward(x, dt, A, B, C, log_decay, output[2])
    ctx.mark_non_differentiable(output[2])


def _gradients(ctx: Any, dy: Tensor, dh: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors[:-1]
    *grads, dh = _backward(dy, dh, *ctx.saved_tensors)
    cast = [None if t is None else grad.to(t.dtype) for t, grad in zip(inputs, grads, strict=True)]
    return *cast, dh


_forward.register_autograd(_gradients, setup_context=_save)
