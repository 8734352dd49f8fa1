"""N-gram heads (arXiv 2401.12973): a token gets the mean of what followed the same n tokens earlier in the text.

The layer follows the authors' code, github.com/berlino/seq_icl, src/models/sequence/rnn/ngram.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Interval
from seqarch.errors import UserError
from seqarch.kernels.blocks import over_query_blocks
from seqarch.kernels.flops import causal_keys
from seqarch.kernels.packed import per_document
from seqarch.kernels.tensors import at_least_float32, check_sequences
from seqarch.mixers.base import Mixer, linear_flops
from seqarch.mixers.cores import KeyValueState

NO_TOKEN = -1
"""Before the first token. A query with fewer than n tokens finds no key before it that has as few."""


class NGram(Mixer):
    """Attention with equal weights, not learned, on the tokens that followed the last n tokens earlier.

        y_t = A mean(x_j) + B x_t,   over j < t with tokens j - n .. j - 1 equal to tokens t - n + 1 .. t

    Without such a j the mean is zero. The authors put layers of n = 1, 2 and 3 into recurrent models.

    Args:
        n: tokens that must be equal.
    """

    source: ClassVar[str] = "arXiv 2401.12973"
    capabilities: frozenset[str] = frozenset({"decode", "packed"})
    kernels: ClassVar[Mapping[str, str]] = {"cpu": "PyTorch", "cuda": "PyTorch"}

    def __init__(
        self, d_model: int, layer_idx: int, n_layers: int, *, n: Annotated[int, Interval(1, 8, "[]")] = 1
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.n = n
        self.earlier, self.own = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(
        self,
        x: Tensor,
        *,
        tokens: Tensor | None = None,
        state: KeyValueState | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        if tokens is None:
            raise UserError("NGram needs the ids of the tokens, which only a model gives: no other mixer may hold it")
        check_sequences({"x [B, T, C]": x}, None)
        keys, ids, start = x.unsqueeze(2), tokens.unsqueeze(-1), 0
        if state is not None:
            start = state.start
            keys, ids = state.extend(keys, ids.unsqueeze(-1))
            ids = ids.squeeze(-1)
            if state.piece is not None:
                cu_seqlens = state.piece.borders(cu_seqlens, state.piece.start)
        check_sequences({"x [B, T, C]": keys.squeeze(2)}, cu_seqlens)
        if cu_seqlens is None:
            means = self._means(x, keys, ids, start)
        else:
            alone = lambda x, keys, ids: self._means(x, keys, ids, keys.shape[1] - x.shape[1])  # noqa: E731
            means = per_document(alone, (x, keys, ids), cu_seqlens)
        return self.earlier(means.to(x.dtype)) + self.own(x)

    def _means(self, x: Tensor, keys: Tensor, ids: Tensor, start: int | Tensor) -> Tensor:
        places = start + torch.arange(x.shape[1], device=x.device)
        grams = torch.cat(
            [F.pad(ids, (0, 0, back, 0), value=NO_TOKEN)[:, : ids.shape[1]] for back in range(self.n)], -1
        )
        before = F.pad(grams, (0, 0, 1, 0), value=NO_TOKEN)[:, : ids.shape[1]]
        query = torch.cat((grams[:, places], places.expand(x.shape[0], -1).unsqueeze(-1)), dim=-1)
        with torch.autocast(x.device.type, enabled=False):
            return over_query_blocks(_mean, query.unsqueeze(2), (keys, before.unsqueeze(2))).squeeze(2)

    def init_state(
        self, batch_size: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> KeyValueState:
        """The tokens so far and their `x`; see `Mixer.init_state`."""
        shape = batch_size, max_length, 1
        kept = torch.zeros(*shape, self.d_model, device=device, dtype=dtype)
        return KeyValueState(kept, torch.zeros(*shape, 1, device=device, dtype=torch.int64), 0, max_length)

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of the projections and of the means, whose weights have no gradient."""
        means = 2.0 * self.d_model * causal_keys(seq_len) / seq_len * (2 if training else 1)
        return linear_flops(self.earlier, self.own) * (3 if training else 1) + means


def _mean(start: int, query: Tensor, keys: Tensor, before: Tensor) -> Tensor:
    """Means `[B, Tq, 1, C]` of `keys [B, Tk, 1, C]` that follow the n-grams `query [B, Tq, 1, n + 1]`.

    Last in `query` is the position, as `start` is not known in static steps.
    """
    earlier = torch.arange(keys.shape[1], device=keys.device) < query[:, :, 0, -1:]
    same = (query[..., :-1] == before[:, None, :, 0]).all(-1)
    keys = at_least_float32(keys.squeeze(2))
    found = (same & earlier).to(keys.dtype)
    return (found / found.sum(-1, keepdim=True).clamp_min(1) @ keys).unsqueeze(2)
