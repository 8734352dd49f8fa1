"""Shared parts of references in chunks: the chunks, and products with a separate decay for every channel."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_SIZE = 32
"""Positions in a chunk of a recurrence with a decay for every channel."""


@dataclasses.dataclass
class DecayedProducts:
    """The result of `decayed_products`."""

    products: Tensor
    before: Tensor
    after: Tensor
    total: Tensor


def decayed_products(rows: Tensor, columns: Tensor, log_decay: Tensor) -> DecayedProducts:
    """`A[i, j] = sum_c rows[i, c] columns[j, c] exp(sum of log_decay[t, c] for j < t < i)` for j < i, zero elsewhere.

    Blocks of 1, 2, 4, ... positions are joined in pairs. An element of the second block meets one of the first through
    the border between them: `exp(decays before i) * exp(decays after j)`. Both exponents are sums of decays, never
    differences of sums. So nothing overflows and nothing cancels, however strong the decays are. A channel takes
    C log C exponentials instead of the C^2 of all pairs.

    Args:
        rows: `[..., R, C, K]`, R kinds of rows, C a power of two.
        columns: `[..., S, C, K]`.
        log_decay: `[..., 1, C, K]`, at most zero.

    Returns:
        `products` `[..., R, S, C, C]`, and sums of `log_decay`, which connect these positions with those outside:
        strictly `before` and strictly `after` each position `[..., 1, C, K]`, and in `total` `[..., 1, 1, K]`.
    """
    C = rows.shape[-2]
    R, S = rows.shape[-3], columns.shape[-3]
    # Blocks of one position; the dimension -3 counts blocks, -2 is within one.
    total = log_decay.unsqueeze(-2)
    before = after = torch.zeros_like(total)
    products = rows.new_zeros(*rows.shape[:-3], R, S, C, 1, 1)
    size = 1
    while size < C:
        (before_1, before_2), (after_1, after_2), (total_1, total_2), (products_1, products_2) = (
            t.unflatten(-3, (-1, 2)).unbind(-3) for t in (before, after, total, products)
        )
        late = rows.unflatten(-2, (-1, 2, size)).select(-3, 1) * before_2.exp()
        early = columns.unflatten(-2, (-1, 2, size)).select(-3, 0) * after_1.exp()
        cross = late.unsqueeze(-4) @ early.unsqueeze(-5).transpose(-1, -2)
        # The first block's products come above the second's; left of the second's come the products of both.
        products = torch.cat((F.pad(products_1, (0, size)), torch.cat((cross, products_2), dim=-1)), dim=-2)
        before = torch.cat((before_1, before_2 + total_1), dim=-2)
        after = torch.cat((after_1 + total_2, after_2), dim=-2)
        total = total_1 + total_2
        size *= 2
    return DecayedProducts(products.squeeze(-3), before.squeeze(-3), after.squeeze(-3), total.squeeze(-3))


def split_chunks(t: Tensor, size: int) -> Tensor:
    """`[B, T, H, D]` to `[B, H, N, size, D]`, with zeros after the end."""
    return F.pad(t.transpose(1, 2), (0, 0, 0, -t.shape[1] % size)).unflatten(2, (-1, size))


def join_chunks(t: Tensor, length: int) -> Tensor:
    """The inverse of `split_chunks`, cut to `length` positions."""
    return t.flatten(2, 3)[:, :, :length].transpose(1, 2)


def chunk_length(length: int, largest: int | None = None) -> int:
    """The smallest power of two that holds `length` positions, at most `largest`, or `CHUNK_SIZE` without it."""
    return min(1 << (length - 1).bit_length(), largest or CHUNK_SIZE)
