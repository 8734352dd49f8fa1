"""Launches Triton kernels as operators of PyTorch, on the GPU of their tensors, on slices of projections."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqarch.kernels.flops import count

ANY_LAYOUT = (torch.Tag.flexible_layout,)
"""Compiled graphs pad the rows of projections; without this they would copy slices of them back to rows as before."""


SIGNATURES: dict[Any, tuple[str, str]] = {}
"""Name and schema of each operator."""


def operator(
    name: str, empty: Callable[..., Any], *, tags: tuple[torch.Tag, ...] = (), schema: str | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """`torch.library.custom_op` for a function that launches kernels: compilers do not look into it.

    `flops.py` has to have the formula that counts it. Triton launches on the current device. Here that is the device of
    the first tensor, so a model may lie on any GPU.

    Args:
        name: of the operator, `namespace::name`.
        empty: gives results of the right shapes and dtypes for the same arguments, without computing them.
        tags: of the operator.
        schema: its signature; read from the function's annotations unless given.
    """

    def register(launch: Callable[..., Any]) -> Any:
        @functools.wraps(launch)
        def on_its_device(*args: Any) -> Any:
            with torch.cuda.device_of(next(t for t in args if isinstance(t, Tensor))):
                return launch(*args)

        signature = schema or torch.library.infer_schema(launch, mutates_args=())
        registered = torch.library.custom_op(name, on_its_device, mutates_args=(), tags=tags, schema=signature)
        registered.register_fake(empty)
        count(name)
        SIGNATURES[registered] = name, signature
        return registered

    return register


def gradient_of(
    forward: Any,
    *,
    gradients: int,
    outputs: int = 1,
    keep: Sequence[int] = (),
    empty: Callable[..., Any] | None = None,
    finish: Callable[..., Sequence[Tensor | None]] = lambda found, *inputs: found,
    materialize: bool = True,
    tags: tuple[torch.Tag, ...] = (),
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for the function that computes the backward pass of `forward`; it becomes an operator too.

    It is called with the gradients of the first `outputs` results, then all arguments of `forward`, then the results
    that are kept. It returns the gradients of the first arguments, None for those that are None. Results beyond the
    first `outputs` have no gradient.

    Args:
        forward: an `operator` called `name` or `name_forward`; the new one is `name_backward`.
        gradients: number of its results.
        outputs: number of results of `forward` that have gradients.
        keep: indices of the results of `forward` that it needs.
        empty: see `operator`; unless given, gradients are like their arguments, empty tensors for those that are None.
        finish: called with the gradients and the arguments; gives the gradients of the first arguments.
        materialize: whether a gradient that does not exist is a tensor of zeros, not None.
        tags: of the operator.
    """
    name, signature = SIGNATURES[forward]
    arguments = signature[1 : signature.index(") ->")]
    given = "".join(f"Tensor{'' if materialize else '?'} gradient_{n}, " for n in range(outputs))
    kept = "".join(f", Tensor kept_{n}" for n in keep)
    schema = f"({given}{arguments}{kept}) -> ({', '.join(['Tensor'] * gradients)})"

    def alike(*args: Any, found: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
        inputs = args[outputs : outputs + gradients]
        found = found or [
            None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs
        ]
        pairs = zip(inputs, found, strict=True)
        return tuple(args[0].new_empty(0) if grad is None else grad.to(t.dtype) for t, grad in pairs)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*results[outputs:])
        ctx.set_materialize_grads(materialize)
        ctx.inputs = [None if isinstance(given, Tensor) else (given,) for given in inputs]
        tensors = [given for given in inputs if isinstance(given, Tensor)]
        ctx.save_for_backward(*tensors, *(results[n] for n in keep))

    def differentiate(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)  # activation checkpointing lets it be read once
        inputs = [next(saved) if other is None else other[0] for other in ctx.inputs]
        found = finish(backward[0](*given[:outputs], *inputs, *saved), *inputs)
        found = [
            None if t is None or grad is None else grad.to(t.dtype) for t, grad in zip(inputs, found, strict=False)
        ]
        return *found, *[None] * (len(inputs) - len(found))

    backward = []

    def register(launch: Callable[..., Any]) -> Any:
        whole = launch if empty else lambda *args: alike(*args, found=launch(*args))
        backward.append(
            operator(f"{name.removesuffix('_forward')}_backward", empty or alike, tags=tags, schema=schema)(whole)
        )
        forward.register_autograd(differentiate, setup_context=save)
        return backward[0]

    return register


def rows(t: Tensor) -> Tensor:
    """The tensor, copied if its rows are not contiguous."""
    return t if t.stride(-1) == 1 else t.contiguous()


def strides(t: Tensor) -> tuple[int, ...]:
    """Strides of batch, position and head."""
    return t.stride()[:3]


def precision(t: Tensor) -> str:
    """The precision of float32 products: three TF32 products, which together keep float32's precision."""
    return "tf32x3" if t.dtype == torch.float32 else "tf32"


def padded(n: int) -> int:
    """The block that holds `n` columns."""
    return max(1 << (n - 1).bit_length(), 16)


def token_rows(t: Tensor) -> Tensor:
    """`t [B, T, ...]`, copied unless each token is in one piece and the tokens of all rows lie one stride apart."""
    inner = torch.empty(t.shape[2:], device="meta").stride()
    in_rows = t.stride()[2:] == inner and (t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1))
    # not contiguous(), which leaves the strides of a dimension of one element as they are
    return t if in_rows else t.clone(memory_format=torch.contiguous_format)


def common_factor(*strides: int) -> int:
    """The largest power of two up to 16 that divides all strides: where the compiler knows one, loads are wide."""
    return next(n for n in (16, 8, 4, 2, 1) if all(stride % n == 0 for stride in strides))
