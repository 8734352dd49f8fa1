"""`SeqarchForCausalLM`: one class of transformers for every model of seqarch, plug-ins included."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from seqarch.errors import UserError, refused
from seqarch.experiment.load import module_of
from seqarch.kernels.tensors import autocast_dtype
from seqarch.mixers.base import each_tensor
from seqarch.model import SequenceLM
from seqarch.model.lm import LMState
from seqarch.training.checkpoint import check_entries
from seqarch.training.weights import EMBEDDING, FILES, HEAD


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
        room = f"past_key_values (room for {self.max_length} tokens) cannot take these: leave it or use_cache out"
        full = self.length + tokens.shape[1] > self.max_length
        with refused(room, UserError, why=True) if full else contextlib.nullcontext():
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


CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What transformers calls the states of earlier tokens: "cache" since 5.20."""


READ = ("num_items_in_batch", "cache_position", "tokenizer")
"""Further arguments of `forward`: of the loss, what older versions give with a cache, which knows its position, and
what `generate` passes on with `stop_strings`."""


class SeqarchConfig(PreTrainedConfig):
    """The options of a model, as a checkpoint of seqarch holds them in `seqarch`.

    Args:
        seqarch: the entries of `seqarch.training.weights.facts_of`.
        vocab_size: number of token ids.
        tie_word_embeddings: whether the head shares the embedding's weights.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        max_position_embeddings: tokens of a training sequence.
    """

    model_type = "seqarch"
    seqarch: dict | None = None
    vocab_size: int = 0
    tie_word_embeddings: bool = True
    hidden_size: int = 0
    num_hidden_layers: int = 0
    max_position_embeddings: int = 2048

    @classmethod
    def of(cls, facts: Mapping[str, Any], **options: Any) -> "SeqarchConfig":
        """The configuration of a model with these facts."""
        model = facts["hyper_parameters"]
        return cls(
            seqarch=dict(facts),
            vocab_size=model["vocab_size"],
            tie_word_embeddings=model.get("tie_embeddings", True),
            hidden_size=model["d_model"],
            num_hidden_layers=model["n_layers"],
            max_position_embeddings=facts["TextDataModule"]["sequence_length"] or cls.max_position_embeddings,
            **options,
        )

    def build(self, allow_code: Sequence[str] = ()) -> SequenceLM:
        """Build the model with new weights.

        Raises:
            UserError: an option is wrong, or a class is not installed or may not be named.
        """
        check_entries({**(self.seqarch or {}), "state_dict": {}}, "the model's config.json")
        content: dict[str, Any] = dict(self.seqarch or {})
        changed = {"vocab_size": self.vocab_size, "tie_embeddings": self.tie_word_embeddings}
        content["hyper_parameters"] = {**content["hyper_parameters"], **changed}
        return module_of(content, allow_code).built()


class SeqarchForCausalLM(PreTrainedModel, GenerationMixin):
    """A `SequenceLM` as transformers takes it: `generate`, `labels`, `Trainer`, PEFT, left-padded batches.

    Args:
        config: of the model.
        allow_code: packages whose classes it may name, next to those of seqarch and plug-ins.
    """

    config_class = SeqarchConfig
    base_model_prefix = "lm"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _tied_weights_keys = {HEAD: EMBEDDING}  # noqa: RUF012 - transformers' name and type
    _no_split_modules = ["Block"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [rf"^{FILES}"]  # noqa: RUF012
    _is_stateful = True  # a recurrence cannot take tokens back, as assisted decoding asks

    def __init__(self, config: SeqarchConfig, allow_code: Sequence[str] = ()) -> None:
        super().__init__(config)
        self.lm = config.build(allow_code)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """As in transformers, but weights that are missing, left over or of another shape are an error.

        Raises:
            UserError: names such weights.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **options)
        model, info = loaded
        for wrong, names in (("lacks", info["missing_keys"]), ("has unknown", info["unexpected_keys"])):
            if names:
                raise UserError(f"the weights are those of another model: it {wrong} {', '.join(sorted(names)[:3])}")
        model._fill_buffers(options.get("allow_code", ()))
        return (model, info) if output_loading_info else model

    def _fill_buffers(self, allow_code: Sequence[str]) -> None:
        """Compute the buffers that are in no file; transformers leaves them empty."""
        saved = self.state_dict().keys()
        empty = {name: each for name, each in self.named_buffers() if name not in saved}
        if empty:
            fresh = dict(self.config.build(allow_code).named_buffers(prefix="lm"))
            for name, each in empty.items():
                each.copy_(fresh[name])

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The model has drawn its own."""

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **options: Any) -> None:
        for block in self.lm.blocks:
            block.activation_checkpointing = enable  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.lm.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.lm.embedding = value

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.lm.head = new_embeddings

    @can_return_tuple
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: StateCache | None = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, V]`, and the loss where there are labels.

        Args:
            input_ids: `[B, T]` token ids.
            attention_mask: `[B, S]`, 0 for padding, S the tokens of the cache and T; each row's ones are next to each
                other. Padding changes nothing: a padded row gives what it gives by itself.
            cache: the states after earlier tokens, from an earlier call; updated in place.
            past_key_values: the same, as transformers called it before.
            labels: `[B, T]` ids, shifted inside; -100 is left out of the loss, and so is a token after padding.
            use_cache: whether to return the states; room for `max_position_embeddings` tokens.
            logits_to_keep: number of last positions whose logits are given; 0 for all.
            **options: `num_items_in_batch`, by which the loss is divided in place of the number of labels.

        Raises:
            UserError: an argument that the model cannot follow.
        """
        for name, value in options.items():
            if name not in READ and value is not None and value is not False:
                raise UserError(f"models of seqarch take no {name}: leave it out")
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = StateCache(self.lm, self.config.max_position_embeddings)
        if cache is not None:
            dtype, last_only = autocast_dtype(self.lm.embedding.weight), logits_to_keep == 1
            logits = cache.read(input_ids, attention_mask, dtype, last_only=last_only)
        else:
            logits = self._whole(input_ids, attention_mask)
        logits = logits[:, -logits_to_keep:] if logits_to_keep else logits
        loss = None
        if labels is not None:
            if attention_mask is not None:  # no token is predicted from padding
                before = attention_mask[:, -labels.shape[1] : -1]
                labels = torch.cat((labels[:, :1], labels[:, 1:].masked_fill(before == 0, -100)), dim=1)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        states: dict[str, Any] = {CACHE: cache}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **states)  # pyright: ignore[reportArgumentType]

    def _whole(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Logits of whole sequences: a row that is padded on the left is moved to the left, and its logits back."""
        starts = StateCache.starts(mask, tokens)
        if starts is None:
            return self.lm(tokens)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        logits = self.lm(tokens.gather(1, (columns + starts[:, None]) % tokens.shape[1]))
        return logits.take_along_dim(((columns - starts[:, None]) % tokens.shape[1])[..., None], dim=1)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *_, **__
    ) -> None:
        for name in ("cache_implementation", "prefill_chunk_size"):
            if getattr(generation_config, name) is not None:
                raise UserError(f"models of seqarch have states of their own: leave {name} out")
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = StateCache(self.lm, max_cache_length + 1)
