"""Matrix products of large linear layers in FP8, by torchao; `model.float8` switches them on."""

from typing import Any, Literal

import torch
from torch import nn

from seqarch.errors import UserError, refused
from seqarch.training.fsdp import data_processes

Scaling = Literal["tensorwise", "rowwise"]
"""What shares a scale, which each product computes anew: a tensor, which is faster, or a row, which rounds less."""

MULTIPLE = 16
"""All three sizes of a product must be multiples of it."""
SMALLEST = 512
"""Fewest inputs or outputs of a layer. Low-rank layers below give decays and steps, which rounding would change."""


def check_float8(trainer: Any) -> None:
    """Raise `UserError` if this run cannot compute in FP8."""
    device, data = trainer.strategy.root_device, trainer.datamodule
    context = trainer.world_size // data_processes(trainer)
    if trainer.precision != "bf16-mixed":
        raise UserError(f"model.float8 needs trainer.precision bf16-mixed, not {trainer.precision}")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError("model.float8 needs a GPU that multiplies in FP8, of capability 8.9 or more: leave it out")
    if (tokens := data.batch_size(data_processes(trainer)) * data.sequence_length // context) % MULTIPLE:
        raise UserError(f"model.float8 needs a multiple of {MULTIPLE} tokens at once, not {tokens}: change the batch")


def use_float8(blocks: nn.Module, scaling: Scaling) -> None:
    """Replace the layers of `blocks` that `takes_float8` by torchao's `Float8Linear`, with the same parameters.

    A product rounds both operands, forward to e4m3. Backward, gradients are rounded to e5m2 ("tensorwise").

    Raises:
        UserError: torchao is not installed, or no layer is large enough.
    """
    with refused("model.float8 needs torchao: pip install 'seqarch[float8]'", ImportError):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    if not any(takes_float8(layer) for layer in blocks.modules()):
        raise UserError("model.float8 would change nothing: no linear layer here is large enough; leave it out")
    config: Any = Float8LinearConfig.from_recipe_name(scaling)
    convert_to_float8_training(blocks, module_filter_fn=lambda layer, name: takes_float8(layer), config=config)


def takes_float8(layer: nn.Module) -> bool:
    """Whether FP8 makes a layer faster, by torchao's rule for scaled tensors on H100, without low-rank layers."""
    if type(layer) is not nn.Linear:
        return False
    sizes = layer.in_features, layer.out_features
    fits = min(sizes) >= SMALLEST and not any(size % MULTIPLE for size in sizes)
    return fits and (layer.in_features > 4096 or layer.out_features > 1024)
