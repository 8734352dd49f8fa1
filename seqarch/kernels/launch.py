"""Launches Triton kernels as operators of PyTorch, on the GPU of their tensors, on slices of projections."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqarch.kernels.flops import Formula, count

ANY_LAYOUT = (torch.Tag.flexible_layout,)
"""Compiled graphs pad the rows of projections. Without this tag they would copy slices to unpadded rows."""

REGISTERED: dict[Any, tuple[str, str, tuple[torch.Tag, ...], Formula]] = {}
"""Name, schema, tags and formula of each operator."""


def operator(
    name: str, empty: Callable[..., Any], *, flops: Formula, tags: tuple[torch.Tag, ...] = (), schema: str | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """`torch.library.custom_op` for a function that launches kernels: compilers do not look into it.

    Triton launches on the current device. Here that is the device of the first tensor, so a model may lie on any GPU.

    Args:
        name: the operator's name, `namespace::name`.
        empty: gives results of the right shapes and dtypes for the same arguments, without computing them.
        flops: its operations, for the same arguments with shapes in place of tensors.
        tags: the operator's tags.
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
        count(name, flops)
        REGISTERED[registered] = name, signature, tags, flops
        return registered

    return register


@dataclasses.dataclass
class gradient_of:
    """Decorator for the function that computes the backward pass of `forward`; it becomes an operator with its tags.

    It is called with the gradients of the first `outputs` results, then all arguments of `forward`, then the results
    that are kept. It returns the gradients of the first arguments, and None for arguments that are None. Results
    beyond the first `outputs` have no gradient.

    Args:
        forward: an `operator` called `name` or `name_forward`; the new one is `name_backward`.
        gradients: number of its results.
        outputs: number of results of `forward` that have gradients.
        keep: indices of the results of `forward` that it needs.
        empty: see `operator`. By default a gradient is like its argument, or an empty tensor if that is None.
        finish: called with the gradients and the arguments; gives the gradients of the first arguments.
        materialize: whether a gradient that does not exist is a tensor of zeros, not None.
        times: its operations over those of `forward`.
    """

    forward: Any
    _: dataclasses.KW_ONLY
    gradients: int
    outputs: int = 1
    keep: Sequence[int] = ()
    empty: Callable[..., Any] | None = None
    finish: Callable[..., Sequence[Tensor]] = lambda found, *inputs: found
    materialize: bool = True
    times: int = 2

    def __call__(self, launch: Callable[..., Any]) -> Any:
        name, signature, tags, flops = REGISTERED[self.forward]
        gradients = "".join(f"Tensor{'' if self.materialize else '?'} gradient_{n}, " for n in range(self.outputs))
        kept = "".join(f", Tensor kept_{n}" for n in self.keep)
        results = ", ".join(["Tensor"] * self.gradients)
        schema = f"({gradients}{signature[1 : signature.index(') ->')]}{kept}) -> ({results})"
        whole = launch if self.empty else lambda *args: self._filled(args, launch(*args))
        made = operator(
            f"{name.removesuffix('_forward')}_backward",
            self.empty or self._alike,
            flops=lambda *args: self.times * flops(*args[self.outputs :]),
            tags=tags,
            schema=schema,
        )
        self.backward = made(whole)
        self.forward.register_autograd(self._differentiate, setup_context=self._save)
        return self.backward

    def _filled(self, args: tuple[Any, ...], found: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The gradients in the dtypes of their arguments; an empty tensor for None, which no operator returns."""
        pairs = zip(args[self.outputs : self.outputs + self.gradients], found, strict=True)
        return tuple(args[0].new_empty(0) if grad is None else grad.to(t.dtype) for t, grad in pairs)

    def _alike(self, *args: Any) -> tuple[Tensor, ...]:
        inputs = args[self.outputs : self.outputs + self.gradients]
        empty = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
        return self._filled(args, [None if t is None else empty(t) for t in inputs])

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*results[self.outputs :])
        ctx.set_materialize_grads(False)  # it would make zeros for results without gradients too
        if self.materialize:
            wanted = results[: self.outputs]
            ctx.zeros = [functools.partial(torch.zeros, t.shape, dtype=t.dtype, device=t.device) for t in wanted]
        ctx.inputs = [None if isinstance(value, Tensor) else (value,) for value in inputs]
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors, *(results[n] for n in self.keep))

    def _differentiate(self, ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = incoming[: self.outputs]
        if self.materialize:
            wanted = tuple(zeros() if grad is None else grad for grad, zeros in zip(wanted, ctx.zeros, strict=True))
        saved = iter(ctx.saved_tensors)  # activation checkpointing lets it be read once
        inputs = [next(saved) if other is None else other[0] for other in ctx.inputs]
        found = self.finish(self.backward(*wanted, *inputs, *saved), *inputs)
        gradients = [None if t is None else grad.to(t.dtype) for t, grad in zip(inputs, found, strict=False)]
        return *gradients, *[None] * (len(inputs) - len(gradients))


def rows(t: Tensor) -> Tensor:
    """The tensor, copied if its rows are not contiguous."""
    return t if t.stride(-1) == 1 else t.contiguous()


def sizes(q: Tensor, k: Tensor) -> tuple[int, int, int, int, int, int]:
    """B, Tq, Tk, H, HK and D of `q [B, Tq, H, D]` and `k [B, Tk, HK, D]`."""
    B, Tq, H, D = q.shape
    return B, Tq, k.shape[1], H, k.shape[2], D


def strides(t: Tensor) -> tuple[int, ...]:
    """Strides of batch, position and head."""
    return t.stride()[:3]


def precision(t: Tensor) -> str:
    """The precision of float32 products: three TF32 products, which together keep float32's precision."""
    return "tf32x3" if t.dtype == torch.float32 else "tf32"


def padded(n: int) -> int:
    """The block that holds `n` columns."""
    return max(1 << (n - 1).bit_length(), 16)


def in_token_rows(t: Tensor) -> bool:
    """Whether each token of `t [B, T, ...]` is in one piece and the tokens of all rows lie one stride apart."""
    inner = torch.empty(t.shape[2:], device="meta").stride()
    return t.stride()[2:] == inner and (t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1))


def token_rows(t: Tensor) -> Tensor:
    """`t [B, T, ...]`, copied unless it is `in_token_rows`."""
    # not contiguous(), which leaves the strides of a dimension of one element as they are
    return t if in_token_rows(t) else t.clone(memory_format=torch.contiguous_format)


def common_factor(*strides: int) -> int:
    """The largest power of two up to 16 that divides all strides: if the compiler knows one, loads are wide."""
    return next(n for n in (16, 8, 4, 2, 1) if all(stride % n == 0 for stride in strides))
