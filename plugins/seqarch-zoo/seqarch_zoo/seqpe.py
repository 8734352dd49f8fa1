"""SeqPE (arXiv 2506.13277): the digits of a position, read by a small Transformer, give its encoding.

Follows the authors' code, github.com/ghrua/seqpe, SequentialPE with the last norm of their language models. Here is the
encoder for any attention mixer; `seqarch_zoo.seqpe_attention` has one for all layers, and the losses that train it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count, Interval
from seqarch.errors import UserError
from seqarch.mixers.base import init_linear, is_fused, leave_undecayed
from seqarch.mixers.positions import PositionEncoding

BASE = 10
MOST_DIGITS = 19
"""The first of them counts steps of 10^18, the largest power of ten in 64 bits."""


class SeqPE(PositionEncoding):
    """Adds a Transformer's encoding of the position's decimal digits to queries and keys, or multiplies them by it.

    The authors share one encoder among all layers; here each layer has its own.

    Args:
        n_heads: query heads H.
        n_kv_heads: key heads.
        head_dim: D.
        width: width of the encoder, a multiple of 4.
        layers: layers of the encoder, of 4 heads each.
        digits: digits of a position; sequences are shorter than `10 ** digits`.
        apply: "add" or "mul", how the encoding changes queries and keys.
    """

    def __init__(
        self,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        width: Count = 64,
        layers: Count = 2,
        digits: Annotated[int, Interval(1, MOST_DIGITS, "[]")] = 6,
        apply: Literal["add", "mul"] = "add",
    ) -> None:
        super().__init__(n_heads, n_kv_heads, head_dim)
        if width % 4:
            raise UserError(f"width must be a multiple of 4, not {width}")
        self.digits, self.apply_method = digits, apply
        self.digit = nn.Embedding(BASE, width)
        self.place = nn.Embedding(digits, width)
        self.last = nn.Parameter(torch.empty(1, 1, width))
        leave_undecayed(self.digit.weight, self.place.weight, self.last)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, (n_heads + n_kv_heads) * head_dim)
        is_fused(self.out, n_heads * head_dim, n_kv_heads * head_dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights normal with standard deviation 0.02, as in GPT-2."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_linear(module)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(std=0.02)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        self.last.normal_(std=0.02)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        of_q, of_k = self.of_heads(self.encode(positions, q.shape[1])).split([self.n_heads, self.n_kv_heads], dim=1)
        if self.apply_method == "mul":
            return q * of_q.to(q.dtype), k * of_k.to(k.dtype)
        return q + of_q.to(q.dtype), k + of_k.to(k.dtype)

    def encode(self, positions: Tensor, length: int = 0) -> Tensor:
        """Encodings `[N, width]` of `positions [N]`; of `length` consecutive ones, if the host cannot read them."""
        readable = positions.numel() and positions.device.type == "cpu" and not torch.compiler.is_compiling()
        end = int(positions.max()) + 1 if readable else length
        if end > BASE**self.digits:
            raise UserError(f"SeqPE has digits for {BASE**self.digits} positions, not {end}: raise digits")
        powers = BASE ** torch.arange(self.digits - 1, -1, -1, device=positions.device)
        digits = positions[:, None] // powers
        # The first is not reduced: where positions are not read above, one with more digits fails in the embedding.
        x = self.digit(torch.cat((digits[:, :1], digits[:, 1:] % BASE), dim=1)) + self.place.weight
        x = torch.cat((x, self.last.expand(x.shape[0], -1, -1)), dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x[:, -1])

    def of_heads(self, encodings: Tensor) -> Tensor:
        """What query heads and key heads make of encodings `[N, width]`: `[N, H + H_kv, D]`."""
        return self.out(encodings).unflatten(-1, (self.n_heads + self.n_kv_heads, self.head_dim))

    def flops_per_token(self) -> float:
        """Operations: the encoder runs once per position, on its digits and one more token; see `PositionEncoding`."""
        out = 2.0 * self.out.weight.numel()
        return (super().flops_per_token() - out) * (self.digits + 1) + out


class _Layer(nn.Module):
    """A pre-norm Transformer layer over `x [T, digits + 1, width]`, causal, as in GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        is_fused(self.qkv, width, width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
