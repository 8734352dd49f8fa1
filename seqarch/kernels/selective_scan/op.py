"""The selective scan: checks, references in plain PyTorch and mamba-ssm's kernel."""

import math
from typing import Any

import torch
from torch import Tensor

from seqarch.kernels.launch import gradient_of, operator
from seqarch.kernels.op import Backend, Op
from seqarch.kernels.packages import mamba_ssm_function
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import Recurred, autocast_cast, check_decay, check_sequences, state_or_zeros

TRITON_STATES = 64
"""Most states of a channel that the kernels hold."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The selective scan of Mamba (arXiv 2312.00752, algorithm 2): each channel has N states, each with its decay.

        h_t[d, n] = a_t[d, n] h_{t-1}[d, n] + dt_t[d] x_t[d] B_t[n]
        y_t[d]    = sum_n C_t[n] h_t[d, n] + D[d] x_t[d]

    The decay `a_t[d, n]` is `exp(dt_t[d] A[d, n])` with `A`, one number per token `exp(log_decay_t)` with `log_decay`,
    and 1 without either.

    Args:
        x: `[B, T, d]` inputs.
        dt: `[B, T, d]` step sizes, positive (after softplus); always float32, because small steps matter.
        A: `[d, N]` float32, negative; None for the other decays.
        B: `[B, T, N]` input weights, in the dtype of `x`.
        C: `[B, T, N]` output weights, in the dtype of `x`.
        D: `[d]` weights of the skip connection; None for none.
        log_decay: `[B, T]` float32, at most 0: one decay for all channels and states; `A` must then be None.
        initial_state: `[rows, d, N]`, rows = B or the number of documents; zeros when None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); each has its own state.
        backend: "auto", "reference", "triton", our CUDA kernels, or "mamba_ssm", the CUDA kernel of that package. That
            kernel takes neither an initial state nor documents, and gives no gradient through the final state. "auto"
            does not choose it.

    Returns:
        Outputs `[B, T, d]` in the dtype of `x`, or of autocast if it is on, and the final states `[B, d, N]` (one for
        each document) in float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together, or a backend that cannot run here.
    """
    x, B, C = autocast_cast(x, B, C)
    shapes = {"x [B, T, d] same": x, "dt [B, T, d]": dt, "B [B, T, N] same": B, "C [B, T, N] same": C}
    states = {"A [d, N]": A, "D [d]": D, "log_decay [B, T]": log_decay, "initial_state [rows, d, N]": initial_state}
    check_sequences({**shapes, **states}, cu_seqlens)
    check_decay(A, log_decay)
    with torch.autocast(x.device.type, enabled=False):
        return SELECTIVE_SCAN.run(backend, x, dt, A, B, C, D, log_decay, initial_state, cu_seqlens)


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


def scan_flops(x, dt, A, B, *_):
    """Each token writes to the state of each channel and reads it."""
    return 4 * math.prod(x) * B[2]


@operator("seqarch::selective_scan_pieces", _empty, flops=scan_flops)
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


def _triton_obstacle(x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, *others: Tensor | None) -> str | None:
    if any(t is not None and t.dtype == torch.float64 for t in (dt, A, *others)):
        return "it does not take float64"
    if B.shape[2] > TRITON_STATES:
        return f"it holds at most {TRITON_STATES} states per channel, not {B.shape[2]}"
    return None


def _mamba_ssm_obstacle(x: Tensor, dt: Tensor, A: Tensor | None, *others: Tensor | None) -> str | None:
    _, _, _, log_decay, initial_state, cu_seqlens = others
    if A is None or log_decay is not None:
        return "it takes only decays by A"
    if initial_state is not None or cu_seqlens is not None:
        return "it takes neither initial_state nor cu_seqlens"
    return None


@torch.compiler.disable()
def by_mamba_ssm(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *_: None) -> Recurred:
    """The CUDA kernel takes time as the last dimension and step sizes in the dtype of `x`."""
    selective_scan_fn = mamba_ssm_function("selective_scan_interface", "selective_scan_fn")
    x, dt, B, C = (t.to(x.dtype).transpose(1, 2).contiguous() for t in (x, dt, B, C))
    skip = None if D is None else D.float()
    y, state = selective_scan_fn(x, dt, A.float(), B, C, skip, return_last_state=True)
    return y.transpose(1, 2), state.detach()


SELECTIVE_SCAN = Op(
    "selective_scan",
    selective_scan_reference,
    (
        Backend("triton", "seqarch.kernels.selective_scan.triton:scan", "triton", obstacle=_triton_obstacle),
        Backend("mamba_ssm", by_mamba_ssm, "mamba_ssm", obstacle=_mamba_ssm_obstacle, automatic=False),
    ),
    fuses=True,
)
