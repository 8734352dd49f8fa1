"""Dtypes of an op's tensors under autocast and in float32, and whether they ask for gradients."""

import torch
from torch import Tensor

Recurred = tuple[Tensor, Tensor]
"""What a recurrence gives: outputs `[B, T, ...]` and the final state."""


def autocast_cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of the surrounding autocast, if any; our operators do not see autocast by themselves."""
    return tuple(t.to(autocast_dtype(t)) for t in tensors)


def autocast_dtype(t: Tensor) -> torch.dtype:
    """The dtype of the surrounding autocast. Without one, or for float64, it is the dtype of `t`."""
    narrows = torch.is_autocast_enabled(t.device.type) and t.dtype != torch.float64
    return torch.get_autocast_dtype(t.device.type) if narrows else t.dtype


def at_least_float32(t: Tensor) -> Tensor:
    """Half precision widened to float32; float32 and float64 as they are."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def softplus(t: Tensor) -> Tensor:
    """`log(1 + exp(t))`; torch.compile gives the gradient of PyTorch's function wrong strides."""
    return torch.logaddexp(t, torch.zeros_like(t))


def state_or_zeros(initial_state: Tensor | None, like: Tensor, *shape: int) -> Tensor:
    """The state, or zeros of `shape`, at least in float32 and as wide as `like`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return like.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)


def is_tracked(*tensors: Tensor | None) -> bool:
    """Whether gradients will flow to one of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
