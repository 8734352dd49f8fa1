"""SeqPE as its authors' language models use it (arXiv 2506.13277): scores have a product of two encodings added.

One encoder serves all layers. Two losses train it beyond the positions that the text has: a contrastive one (section
3.2) and a distillation (section 3.3). Follows github.com/ghrua/seqpe, text_seqpe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.arguments import Count, Interval
from seqarch.errors import UserError
from seqarch.kernels.tensors import at_least_float32, document_positions
from seqarch.mixers.attention import CoreAttention
from seqarch.mixers.base import Carry, Losses, Mixer
from seqarch.mixers.cores import SoftmaxCore
from seqarch.mixers.options import with_options_of
from seqarch_zoo.seqpe import BASE, SeqPE

ENCODINGS = "seqpe"
"""In the carry: what query heads and key heads make of the encodings, `[B, T, H + H_kv, D]`."""
HEADS = 4
"""Parts of an encoding that are compared by themselves in the distillation; as many as the encoder has heads."""
ROWS, CANDIDATES, STUDENTS, NEAR = 32, 64, 32, 256
"""Rows of each loss, positions that a row of the contrastive loss and of the other compares, and tokens of a window."""
NEAR_SHARE, HARD_SHARE = 0.6, 0.25
"""Rows whose candidates are near each other, and candidates of other rows that differ from the pivot in one digit."""


WITHOUT = ("core", "position", "rope_base", "relation", "max_length", "qk_norm", "qk_norm_eps")
"""Options of `CoreAttention` that it does not take."""


class SeqPEAttention(CoreAttention):
    """Softmax attention with SeqPE. The first such layer of a model has the encoder; later ones take its encodings.

    Training adds the losses `contrast` and `distil`.

    Args:
        n_heads: query heads H.
        width: width of the encoder, a multiple of 4.
        layers: layers of the encoder, of 4 heads each.
        digits: digits of a position; sequences are shorter than `10 ** digits`.
        apply: "scalar" adds the product of the encodings of query and key to a score; "add" and "mul" change queries
            and keys.
        max_position: the losses train positions below it.
        contrast: weight of the contrastive loss.
        distil: weight of the distillation.
        **options: as in `CoreAttention`.
    """

    source: ClassVar[str] = "arXiv 2506.13277"
    ops: ClassVar[tuple[str, ...]] = ("softmax_attention",)

    @with_options_of(CoreAttention, without=WITHOUT)
    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: Count,
        width: Count = 64,
        layers: Count = 2,
        digits: Annotated[int, Interval(1, 19, "[]")] = 6,
        apply: Literal["scalar", "add", "mul"] = "scalar",
        max_position: Annotated[int, Interval(2 * NEAR)] = 20_000,
        contrast: Annotated[float, Interval(0)] = 0.1,
        distil: Annotated[float, Interval(0)] = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, core=SoftmaxCore(), position="none", n_heads=n_heads, **options)
        if max_position > BASE**digits:
            raise UserError(f"max_position={max_position} has more than digits={digits} digits")
        self.capabilities = frozenset({"decode", "packed"})
        self.score_method, self.max_position, self.contrast, self.distil = apply, max_position, contrast, distil
        sizes: dict[str, Any] = {"width": width, "layers": layers, "digits": digits}
        self.encoder: SeqPE | None = SeqPE(self.n_heads, self.n_kv_heads, self.head_dim, **sizes)

    def reset_parameters(self) -> None:
        """Draw the initial weights as in GPT-2, also of the encoder."""
        super().reset_parameters()
        encoder: SeqPE | None = getattr(
            self, "encoder", None
        )  # the parent's constructor calls this before there is one
        if encoder is not None:
            encoder.reset_parameters()

    def connect(self, earlier: Sequence[Mixer]) -> None:
        if any(isinstance(mixer, SeqPEAttention) for mixer in earlier):
            self.encoder = None

    def forward(
        self,
        x: Tensor,
        *,
        state: Any = None,
        cu_seqlens: Tensor | None = None,
        carry: Carry | None = None,
        losses: Losses | None = None,
    ) -> Tensor:
        q, k, v = self.project(x, state=state, cu_seqlens=cu_seqlens)
        carry = {} if carry is None else carry
        if self.encoder is not None:
            start = 0 if state is None else state.start
            positions = document_positions(x, start=start, cu_seqlens=cu_seqlens)
            heads = self.encoder.of_heads(self.encoder.encode(positions, x.shape[1]))
            carry[ENCODINGS] = heads.expand(x.shape[0], -1, -1, -1)
            if losses is not None:
                if 2 * x.shape[1] > self.max_position:
                    shortest = 2 * x.shape[1]
                    raise UserError(
                        f"max_position must be at least {shortest}, twice the sequence: {self.max_position}"
                    )
                losses["contrast"] = self.contrast * contrastive_loss(self.encoder, self.max_position)
                losses["distil"] = self.distil * distillation_loss(self.encoder, self.max_position, x.shape[1])
        if ENCODINGS not in carry:
            raise UserError("SeqPEAttention took its encodings from an earlier layer that is not there")
        of_q, of_k = carry[ENCODINGS].to(q.dtype).split([self.n_heads, self.n_kv_heads], dim=2)
        if self.score_method == "scalar":
            q, k, v = torch.cat((q, of_q), dim=-1), torch.cat((k, of_k), dim=-1), F.pad(v, (0, self.head_dim))
        elif self.score_method == "add":
            q, k = q + of_q, k + of_k
        else:
            q, k = q * of_q, k * of_k
        return self.out(self.attend(q, k, v, state=state, cu_seqlens=cu_seqlens)[..., : self.head_dim].flatten(2))

    def init_state(self, batch_size, max_length, device, dtype):
        wide = self.head_dim * (2 if self.score_method == "scalar" else 1)
        like = {"device": device, "dtype": dtype}
        state = self.attend.core.init_state(batch_size, max_length, self.n_kv_heads, wide, **like)
        if (convolution := self.canon or self.convolution) is not None:
            state.convolution = convolution.init_state(batch_size, device, dtype)
        return state

    def attention_entropy(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> None:
        """None: a layer by itself does not know its encodings."""

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of the attention, of its longer heads, and of the encoder, which runs once for a batch."""
        own = super().flops_per_token(seq_len, training=training)
        if self.score_method == "scalar":
            own += self.attend.flops_per_token(seq_len, training=training)
        return own + (self.encoder.flops_per_token() * (3 if training else 1) if self.encoder is not None else 0.0)


def contrastive_loss(encoder: SeqPE, max_position: int) -> Tensor:
    """Cross-entropy of which of some positions is nearest to a pivot, by products of encodings (section 3.2)."""
    device = encoder.last.device
    pivots, candidates = draw_candidates(max_position, encoder.digits, device)
    encodings = encoder.encode(torch.cat((pivots, candidates.flatten())))
    of_pivots, of_candidates = encodings.split([ROWS, ROWS * CANDIDATES])
    products = torch.einsum("nd,nmd->nm", of_pivots, of_candidates.unflatten(0, (ROWS, CANDIDATES)))
    again = (candidates.unsqueeze(2) == candidates.unsqueeze(1)).tril(-1).any(-1)
    left_out = again | (candidates == pivots.unsqueeze(1))
    distance = (candidates - pivots.unsqueeze(1)).abs().masked_fill(left_out, max_position)
    return F.cross_entropy(at_least_float32(products).masked_fill(left_out, -torch.inf), distance.argmin(-1))


def draw_candidates(max_position: int, digits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pivots `[ROWS]` and for each `CANDIDATES` positions, of which some may come twice or be the pivot.

    They are of a window, or from everywhere and in part a pivot with another digit.
    """
    pivots = torch.randint(max_position, (ROWS,), device=device)
    start = torch.randint(max_position - NEAR + 1, (ROWS, 1), device=device)
    near = start + torch.rand(ROWS, NEAR, device=device).argsort(-1)[:, :CANDIDATES]
    far = torch.randint(max_position, (ROWS, CANDIDATES), device=device)
    n_hard = int(CANDIDATES * HARD_SHARE)
    shape = ROWS, n_hard
    place = BASE ** torch.randint(digits, shape, device=device)
    digit = torch.randint(BASE, shape, device=device)
    hard = pivots.unsqueeze(1) + (digit - pivots.unsqueeze(1) // place % BASE) * place
    far = torch.cat((torch.where(hard < max_position, hard, far[:, :n_hard]), far[:, n_hard:]), dim=1)
    return pivots, torch.where(torch.rand(ROWS, 1, device=device) < NEAR_SHARE, near, far)


def distillation_loss(encoder: SeqPE, max_position: int, length: int) -> Tensor:
    """How far similarities of shifted positions are from those of the text's positions, which teach (section 3.3)."""
    device = encoder.last.device
    count = min(STUDENTS, length)
    taught = torch.rand(ROWS, length, device=device).argsort(-1)[:, :count]
    shift = torch.randint(length // 4, max_position - length, (ROWS, 1), device=device)
    with torch.no_grad():
        teacher = _similarities(encoder, taught)
    student = _similarities(encoder, taught + shift)
    return ((teacher.exp() - student.exp()) * (teacher - student)).mean()  # the divergences in both directions


def _similarities(encoder: SeqPE, positions: Tensor) -> Tensor:
    """Logarithms of the similarities `[N, HEADS, M, M]` of `positions [N, M]` with each other, which sum to one."""
    parts = encoder.encode(positions.flatten()).unflatten(0, positions.shape).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return at_least_float32(parts @ parts.mT).log_softmax(-1)
