"""Which matrices of a mixer have inputs whose number does not grow as `d_model` does, for `seqarch.model.transfer`."""

from collections.abc import Callable

from torch import nn


def has_few_inputs(
    layer: nn.Linear, inputs_at: Callable[[int], int] | None = None, *, orthogonal: bool = False
) -> None:
    """Note the number of inputs of a layer at any `d_model`, by default the same.

    Args:
        layer: whose weight is a matrix.
        inputs_at: the number of inputs at a `d_model`.
        orthogonal: whether the weight starts with orthogonal columns of the same length at all widths.
    """
    layer.weight._inputs_at = inputs_at or _same  # pyright: ignore[reportAttributeAccessIssue]
    layer.weight._orthogonal = orthogonal  # pyright: ignore[reportAttributeAccessIssue]


def _same(d_model: int) -> int:
    return 1
