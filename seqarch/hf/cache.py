"""`StateCache`: the decoding states of a batch, as `generate` of transformers carries them."""

import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.mixers.base import each_tensor
from seqarch.model import SequenceLM
from seqarch.model.lm import LMState


class StateCache:
    """The states of the rows of a batch.

    Rows with equally many tokens share one state of the model, so that a row that is padded on the left has the state
    that it has without padding. Rows without padding are read together.

    Args:
        lm: the model.
        max_length: tokens for which there is room.
    """

    is_compileable = False
    is_croppable = False
    is_linear = (False,)
    """What `generate` asks: it gives the new tokens only, and takes none back."""

    def __init__(self, lm: SequenceLM, max_length: int) -> None:
        self.lm = lm
        self.max_length = max_length
        self.length = 0
        self.groups: list[tuple[Tensor, int, LMState]] = []
        """For rows with equally many tokens: their indices, the columns before them, and their state."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that were read, padding included."""
        return self.length

    def read(self, tokens: Tensor, mask: Tensor | None, dtype: torch.dtype, *, last_only: bool = False) -> Tensor:
        """Logits `[B, T, V]` of new tokens `[B, T]`, or `[B, 1, V]`; those of padding are zero.

        Args:
            tokens: the new tokens.
            mask: `[B, S]`, 0 for padding, which may be on the left of the first call only.
            dtype: of the states.
            last_only: whether to give the logits of the last token only.

        Raises:
            UserError: the mask pads elsewhere, the batch has another size, or a mixer cannot decode.
        """
        if not self.groups:
            self._begin(tokens, mask, dtype)
        elif mask is not None and not bool(mask[:, self.length :].all()):
            raise UserError("attention_mask hides tokens after the first: pad on the left, before the first token")
        if sum(len(rows) for rows, _, _ in self.groups) != len(tokens):
            raise UserError(f"past_key_values is of another batch, not of {len(tokens)} rows")
        parts = [
            self.lm(tokens[rows, max(0, before - self.length) :], state=state, last_only=last_only)
            for rows, before, state in self.groups
        ]
        self.length += tokens.shape[1]
        width = 1 if last_only else tokens.shape[1]
        logits = parts[0].new_zeros(len(tokens), width, parts[0].shape[-1])
        for (rows, _, _), part in zip(self.groups, parts, strict=True):
            logits[rows, width - part.shape[1] :] = part
        return logits

    def _begin(self, tokens: Tensor, mask: Tensor | None, dtype: torch.dtype) -> None:
        starts = self.starts(mask, tokens, right=False)
        starts = torch.zeros_like(tokens[:, 0]) if starts is None else starts
        for start in starts.unique().tolist():
            rows = (starts == start).nonzero().squeeze(1)
            state = self.lm.init_state(len(rows), self.max_length, tokens.device, dtype)
            self.groups.append((rows, start, state))

    @staticmethod
    def starts(mask: Tensor | None, tokens: Tensor, *, right: bool = True) -> Tensor | None:
        """The columns of padding on the left of each row, `[B]`; `None` if there are none.

        Raises:
            UserError: the mask is not `[B, T]`, or hides tokens within a row, or after one unless `right`.
        """
        if mask is None:
            return None
        if mask.shape != tokens.shape:
            raise UserError(f"attention_mask must be of shape {[*tokens.shape]}, as input_ids, not {[*mask.shape]}")
        seen = mask != 0
        if bool(seen.all()):
            return None
        starts = seen.int().argmax(dim=1)
        ends = starts + seen.sum(dim=1) if right else torch.full_like(starts, tokens.shape[1])
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        if not bool((seen == ((columns >= starts[:, None]) & (columns < ends[:, None]))).all()):
            raise UserError("attention_mask hides tokens between others or on the right: pad prompts on the left")
        return starts if bool(starts.any()) else None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from the state of row `beam_idx[i]`, as beam search asks.

        Raises:
            UserError: a mixer's state does not hold one entry per row.
        """
        for rows, _, state in self.groups:
            places = torch.searchsorted(rows, beam_idx.to(rows.device)[rows])
            for owner, name in state.owned():
                value = getattr(owner, name)
                if any(each.ndim == 0 or len(each) != len(rows) for each in each_tensor(value)):
                    raise UserError(f"the state {type(owner).__name__} has no entry per row: leave num_beams out")
                chosen = tuple(each.index_select(0, places) for each in each_tensor(value))
                setattr(owner, name, chosen if isinstance(value, tuple) else chosen[0])
