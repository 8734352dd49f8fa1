"""Positions of tokens: in packed documents, rotary embeddings (RoPE), linear biases (ALiBi)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from seqarch.arguments import Count, Interval, Limited, Positive
from seqarch.errors import UserError
from seqarch.mixers.base import Device, linear_flops, reset_children


class PositionEncoding(Limited, nn.Module, ABC):
    """Makes queries and keys depend on the positions of their tokens; an attention mixer's `position` takes one.

    A plug-in declares it in the entry points `seqarch.positions`. Every layer has its own.

    Args:
        n_heads: query heads H.
        n_kv_heads: key heads.
        head_dim: D.
    """

    def __init__(self, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The new `q [B, T, H, D]` and `k [B, T, H_kv, D]` of tokens at `positions [T]`, counted from 0."""

    def flops_per_token(self) -> float:
        """Forward operations per token."""
        return linear_flops(*(layer for layer in self.modules() if isinstance(layer, nn.Linear)))

    def reset_parameters(self) -> None:
        """Draw the initial weights; by default each submodule draws its own."""
        reset_children(self)


Base = Annotated[float, Interval(1, math.inf, "()")]
"""The longest wavelength of RoPE over 2 pi."""
PositionName = Literal["rope", "alibi", "none"]
Position = PositionName | Callable[[int, int, int], PositionEncoding]
"""What `position` of an attention mixer may be: a name, or (in a recipe) the class of a `PositionEncoding`."""


def rope_tables(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[T, head_dim / 2]` of `position * base^(-2 i / head_dim)` (Su et al. 2021, arXiv 2104.09864).

    Angles are taken in float64: in float32 an angle of 100,000 radians is off by up to 0.004. For more than one
    position an operator of its own keeps compilers from fusing the trigonometry into the rotation, where every batch
    row and head would repeat it. For one position that costs less than launching the operator.
    """
    return (_tables if positions.shape[0] == 1 else _tables_operator)(positions, head_dim, base, dtype)


def _tables(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = positions[:, None] * torch.pow(base, -exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


_tables_operator = torch.library.custom_op("seqarch::rope_tables", _tables, mutates_args=())


@_tables_operator.register_fake
def _(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos = positions.new_empty(positions.shape[0], head_dim // 2, dtype=dtype)
    return cos, torch.empty_like(cos)


def apply_rope(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `x [B, T, H, D]`: element i of the first half of D pairs with element i of the second half.

    Computed in the precision of the tables, float32 or more; returned in the dtype of `x`.
    """
    cos, sin = (table[:, None] for table in tables)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def alibi_slopes(n_heads: int, device: Device | None = None) -> Tensor:
    """Slopes `[n_heads]` (float32) of ALiBi (Press et al. 2022, arXiv 2108.12409, section 3).

    For n heads, a power of two, the geometric sequence that starts at 2^(-8/n) with that ratio. Otherwise the slopes of
    the next lower power of two, then every other slope of the next higher one, as in the authors' code.
    """
    power = 1 << (n_heads.bit_length() - 1)
    heads = torch.arange(1, n_heads + 1, device=device, dtype=torch.float32)
    extra = 2 * (heads - power) - 1
    return torch.exp2(-8 / power * torch.where(heads <= power, heads, extra / 2))


class ScaledRoPE(PositionEncoding):
    """RoPE whose wavelengths are stretched for more tokens than a model was first trained on.

    Args:
        base: longest wavelength before scaling, over 2 pi.
        factor: by which wavelengths grow.
        rule: "linear": all of them (arXiv 2306.15595); "llama3": those that fit into `original_length` fewer than
            `low` times, none that fit more than `high` times, and in between a mean of both (arXiv 2407.21783).
        original_length: tokens of the sequences of the first training; with "llama3".
        low: see `rule`.
        high: see `rule`.
    """

    def __init__(
        self,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        base: Base = 10000.0,
        factor: Annotated[float, Interval(1)] = 1.0,
        rule: Literal["linear", "llama3"] = "linear",
        original_length: Count = 8192,
        low: Positive = 1.0,
        high: float = 4.0,
    ) -> None:
        super().__init__(n_heads, n_kv_heads, head_dim)
        if head_dim % 2 or not low < high:
            raise UserError(f"ScaledRoPE needs an even head_dim, not {head_dim}, and low {low} below high {high}")
        self.base, self.factor, self.rule = float(base), float(factor), rule
        self.original_length, self.low, self.high = original_length, low, high

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float64) / self.head_dim
        frequencies = torch.pow(self.base, -exponents)
        kept = torch.zeros_like(frequencies)
        if self.rule == "llama3":
            fits = self.original_length * frequencies / (2 * torch.pi)
            kept = ((fits - self.low) / (self.high - self.low)).clamp(0, 1)
        angles = positions[:, None] * frequencies * (kept + (1 - kept) / self.factor)
        dtype = torch.promote_types(q.dtype, torch.float32)
        tables = angles.cos().to(dtype), angles.sin().to(dtype)
        return apply_rope(q, tables), apply_rope(k, tables)
