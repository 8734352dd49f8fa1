"""The attention family: `Attention`, `Top1Element`, `Top1Chunk` are one mixer with exchangeable parts."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from seqarch.arguments import Count, Limited, Positive, divide
from seqarch.errors import UserError
from seqarch.kernels.tensors import document_positions, known_end
from seqarch.kernels.top1_chunk.op import CHUNK_SIZE
from seqarch.mixers.base import (
    Clock,
    Mixer,
    MixerState,
    Scale,
    has_fixed_std,
    init_linear,
    is_fused,
    linear_flops,
    reset_children,
    residual_std,
    size_heads,
    undecayed,
)
from seqarch.mixers.cores import AttentionCore, PieceState, Selection, SoftmaxCore, Top1ChunkCore, Top1ElementCore
from seqarch.mixers.options import with_options_of
from seqarch.mixers.pieces import uncompiled
from seqarch.mixers.positions import Base, Position, PositionEncoding, alibi_slopes, apply_rope, rope_tables
from seqarch.mixers.short_convolution import Kernel, ShortConvolution, optional_convolution

Relation = Literal["real", "constant_keys", "constant_queries_keys"]
QKNorm = bool | Literal["weighted"]


class Attend(Limited, nn.Module):
    """Normalise queries and keys, give them their positions, attend; only a position encoding has parameters.

    Scores are `q . k / temperature`. Without normalisation the temperature is `sqrt(D)` unless given, as in the
    Transformer. With `qk_norm`, queries and keys have unit length, so scores lie in [-1/temperature, 1/temperature],
    whatever the projections learn. The temperature is then `1 / sqrt(D)` unless given: scores have the size that
    vectors with elements of unit variance have in the Transformer. At `sqrt(D)` all keys would weigh nearly the same.

    Args:
        core: the attention core.
        n_heads: query heads H.
        head_dim: D.
        n_kv_heads: key/value heads; as many as `n_heads` unless given.
        position: "rope" (after the normalisation), "alibi" (only for cores that take it), "none", or a class of
            `PositionEncoding` (after the normalisation).
        rope_base: longest wavelength of RoPE, over 2 pi.
        qk_norm: whether queries and keys are normalised to unit length; with "weighted" each channel has a weight too.
        qk_norm_eps: epsilon of this normalisation.
        temperature: divisor of the scores.
    """

    def __init__(
        self,
        core: AttentionCore,
        n_heads: Count,
        head_dim: Count,
        *,
        n_kv_heads: Count | None = None,
        position: Position,
        rope_base: Base,
        qk_norm: QKNorm,
        qk_norm_eps: float = 1e-6,
        temperature: Positive | None,
    ) -> None:
        super().__init__()
        if position == "rope" and head_dim % 2:
            raise UserError(f"position='rope' needs an even head_dim, not {head_dim}")
        if position == "alibi" and not core.alibi:
            raise UserError(f"position='alibi' does not go with {type(core).__name__}: use 'rope' or 'none'")
        self.core = core
        self.n_heads = n_heads
        self.head_dim = head_dim
        self.position = position
        self.encoding = None if isinstance(position, str) else position(n_heads, n_kv_heads or n_heads, head_dim)
        self.rope_base = float(rope_base)
        self.qk_norm = qk_norm
        weighted = qk_norm == "weighted"
        norms = (nn.RMSNorm(head_dim, eps=qk_norm_eps, elementwise_affine=weighted) for _ in range(2))
        self.norms = nn.ModuleList(norms) if qk_norm else None  # of queries and of keys
        divisor: float = temperature or head_dim ** (-0.5 if qk_norm else 0.5)
        # Normalised vectors are kept with unit root mean square, which bf16 and RMSNorm kernels like better.
        self.scale = 1 / (divisor * head_dim) if qk_norm else 1 / divisor

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None, **inputs: Any
    ) -> Tensor:
        """Outputs `[B, T, H, D]` for `q [B, T, H, D]` and `k, v [B, T, H_kv, D]`; `inputs` are the core's own."""
        start = 0 if state is None else state.start
        clock = None if state is None else state.clock
        q, k = self._transform(q, k, start, cu_seqlens, clock)
        core = partial(self.core, scale=self.scale, alibi_slopes=self._slopes(q))
        if isinstance(state, PieceState) and state.piece is not None:
            return state.piece.attend(core, q, k, v, state.window, cu_seqlens, **inputs)
        if state is not None and clock is None:
            # A graph over a state that grows would be made again for each length, and copy the state.
            left = torch.compiler.is_compiling()
            return uncompiled(core, q, k, v, left=left, state=state, cu_seqlens=cu_seqlens, **inputs)
        return core(q, k, v, state=state, cu_seqlens=cu_seqlens, **inputs)

    def entropy(self, q: Tensor, k: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Entropy `[B, T, H]` in nats of the distribution over keys."""
        q, k = self._transform(q, k, 0, cu_seqlens)
        return self.core.entropy(q, k, scale=self.scale, alibi_slopes=self._slopes(q), cu_seqlens=cu_seqlens)

    def prepare(self, clock: Clock, max_length: int, dtype: torch.dtype) -> None:
        """Give the rotations of all positions to the clock of static steps: angles cost more than a rotation."""
        key = self.head_dim, self.rope_base
        if self.position == "rope" and key not in clock.rotations:
            positions = torch.arange(max_length, device=clock.position.device)
            clock.rotations[key] = rope_tables(positions, *key, torch.promote_types(dtype, torch.float32))

    def _transform(
        self, q: Tensor, k: Tensor, start: int | Tensor, cu_seqlens: Tensor | None, clock: Clock | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.norms is not None:
            q, k = (norm(tensor).to(tensor.dtype) for norm, tensor in zip(self.norms, (q, k), strict=True))
        if self.position == "rope":
            if clock is not None and clock.rotations:
                cos, sin = clock.rotations[self.head_dim, self.rope_base]
                tables = cos.index_select(0, clock.position), sin.index_select(0, clock.position)
            else:
                positions = document_positions(q, start=start, cu_seqlens=cu_seqlens)
                dtype = torch.promote_types(q.dtype, torch.float32)
                tables = rope_tables(positions, self.head_dim, self.rope_base, dtype)
            q, k = apply_rope(q, tables), apply_rope(k, tables)
        if self.encoding is not None:
            q, k = self.encoding(q, k, document_positions(q, start=start, cu_seqlens=cu_seqlens))
        return q, k

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of the core and of the position encoding; see `Mixer.flops_per_token`."""
        flops = self.core.flops_per_token(seq_len, self.n_heads, self.head_dim, training=training)
        return flops + (self.encoding.flops_per_token() * (3 if training else 1) if self.encoding is not None else 0.0)

    def reset_parameters(self) -> None:
        """Draw the initial weights of the position encoding and of the normalisation, if they have any."""
        reset_children(self)

    def _slopes(self, q: Tensor) -> Tensor | None:
        return alibi_slopes(self.n_heads, q.device) if self.position == "alibi" else None

    def extra_repr(self) -> str:
        position = self.position if self.encoding is None else type(self.encoding).__name__
        return f"position={position}, qk_norm={self.qk_norm}, scale={self.scale:.4g}"


class CoreAttention(Mixer):
    """Projections around any attention core; the members of the family below differ in the core and its options.

    Args:
        core: the attention core.
        n_heads: query heads H.
        n_kv_heads: key/value heads, a divisor of `n_heads`; as many as `n_heads` unless given.
        head_dim: D; `d_model / n_heads` unless given.
        position: "rope", "alibi", "none" or a class of `PositionEncoding`; learned absolute positions belong to the
            model's embedding.
        rope_base: base of RoPE.
        qk_norm: whether queries and keys are normalised to unit length (before RoPE); with "weighted" each channel has
            a weight too, as in Qwen3 (arXiv 2505.09388).
        qk_norm_eps: epsilon of this normalisation.
        temperature: divisor of the scores; `sqrt(D)`, or `1 / sqrt(D)` with `qk_norm`, unless given.
        relation: "real", "constant_keys" or "constant_queries_keys": trainable constants, one vector per position
            and head, in place of keys, or of queries and keys (arXiv 2505.18522, section 3.2.2).
        max_length: number of positions that have constants; only with constants, where it is required.
        bias: whether the projections have one; "qkv": all but the output projection, as in Qwen2 (arXiv 2407.10671).
        key_conv: tokens that a convolution over the keys sees, their own included; none unless given. A key k becomes
            `k + silu(conv(k))` before it is normalised (arXiv 2511.11571).
        scaled_output: whether the output projection starts `sqrt(2 n_layers)` times smaller than others, as in GPT-2.
    """

    capabilities: frozenset[str] = frozenset({"decode", "packed", "entropy"})
    family: ClassVar[str] = "attention"
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads", "n_kv_heads": "heads", "head_dim": "head"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 12}, 2048: {"n_heads": 16}}

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        core: AttentionCore,
        n_heads: Count,
        n_kv_heads: Count | None = None,
        head_dim: Count | None = None,
        position: Position = "rope",
        rope_base: Base = 10000.0,
        qk_norm: QKNorm = False,
        qk_norm_eps: float = 1e-6,
        temperature: Positive | None = None,
        relation: Relation = "real",
        max_length: Count | None = None,
        bias: bool | Literal["qkv"] = False,
        key_conv: Kernel | None = None,
        scaled_output: bool = True,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.scaled_output = scaled_output
        self.n_heads, self.head_dim = n_heads, size_heads(d_model, n_heads, head_dim)
        self.n_kv_heads = n_kv_heads or n_heads
        divide(n_heads=n_heads, n_kv_heads=self.n_kv_heads)
        if (relation == "real") != (max_length is None):
            raise UserError(f"relation={relation} with max_length={max_length}: constants need it, real ones do not")
        self.max_length = max_length
        norm: dict[str, Any] = {"qk_norm": qk_norm, "qk_norm_eps": qk_norm_eps, "temperature": temperature}
        place: dict[str, Any] = {"position": position, "rope_base": rope_base}
        self.attend = Attend(core, n_heads, self.head_dim, n_kv_heads=self.n_kv_heads, **place, **norm)
        q_heads = 0 if relation == "constant_queries_keys" else n_heads
        k_heads = 0 if relation != "real" else self.n_kv_heads
        self.projected_heads = [q_heads, k_heads, self.n_kv_heads]
        self.qkv = nn.Linear(d_model, sum(self.projected_heads) * self.head_dim, bias=bool(bias))
        is_fused(self.qkv, *(heads * self.head_dim for heads in self.projected_heads if heads))
        self.out = nn.Linear(n_heads * self.head_dim, d_model, bias=bias is True)
        self.convolution = _key_convolution(k_heads * self.head_dim, key_conv)
        self.canon_channels = self.qkv.out_features if self.convolution is None else None
        # constants stand for activations, which do not decay
        self.constant_queries = None if q_heads else undecayed(max_length or 0, n_heads, self.head_dim)
        self.constant_keys = None if k_heads else undecayed(max_length or 0, self.n_kv_heads, self.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights as in GPT-2. Constants start with the size of projected vectors."""
        init_linear(self.qkv)
        init_linear(self.out, residual_std(self.n_layers, scaled=self.scaled_output))
        self.attend.reset_parameters()
        if self.convolution is not None:
            self.convolution.reset_parameters()
        for constants in (self.constant_queries, self.constant_keys):
            if constants is not None:
                nn.init.normal_(constants, std=0.02 * self.d_model**0.5)
                has_fixed_std(constants)

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x, state=state, cu_seqlens=cu_seqlens)
        return self.out(self.attend(q, k, v, state=state, cu_seqlens=cu_seqlens).flatten(2))

    def project(
        self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, T, H, D]`, keys and values `[B, T, H_kv, D]`, as `attend` takes them. Shells may call it.

        With `key_conv`, a call with a state writes the last keys into it.
        """
        start = 0 if state is None else state.start
        before = None if state is None else state.convolution
        projected = self.after_canon(self.qkv(x), before, cu_seqlens)
        heads = projected.unflatten(-1, (sum(self.projected_heads), self.head_dim))
        q, k, v = heads.split(self.projected_heads, dim=2)
        if self.convolution is not None:
            k = k + self.convolution(k.flatten(2), state=before, cu_seqlens=cu_seqlens).view_as(k)
        if self.constant_keys is not None:
            k = self._constant_heads(self.constant_keys, x, start, cu_seqlens).to(v.dtype)
        if self.constant_queries is not None:
            q = self._constant_heads(self.constant_queries, x, start, cu_seqlens).to(v.dtype)
        return q, k, v

    def _constant_heads(self, constants: Tensor, x: Tensor, start: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
        if (end := known_end(x, start, cu_seqlens)) > constants.shape[0]:
            raise UserError(f"the constants end at {constants.shape[0]}, and this call at {end}: raise max_length")
        rows = constants[document_positions(x, start=start, cu_seqlens=cu_seqlens)]
        return rows.expand(x.shape[0], -1, -1, -1)

    def init_state(self, batch_size, max_length, device, dtype) -> MixerState:
        state = self.attend.core.init_state(
            batch_size, max_length, self.n_kv_heads, self.head_dim, device=device, dtype=dtype
        )
        if (convolution := self.canon or self.convolution) is not None:
            state.convolution = convolution.init_state(batch_size, device, dtype)
        return state

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        convolution = 0.0 if self.convolution is None else self.convolution.flops_per_token()
        projections = (linear_flops(self.qkv, self.out) + convolution) * (3 if training else 1)
        return projections + self.attend.flops_per_token(seq_len, training=training)

    @torch.no_grad()
    def attention_entropy(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Entropy `[B, T, H]` in nats of the distribution that the core defines, without gradient."""
        q, k, _ = self.project(x, cu_seqlens=cu_seqlens)
        return self.attend.entropy(q, k, cu_seqlens=cu_seqlens)


class Attention(CoreAttention):
    """Softmax attention, with an optional window, real or constant relations.

    Args:
        n_heads: query heads H.
        window: number of last keys that a query sees, its own included; all unless given.
        **options: as in `CoreAttention`.
    """

    scales: ClassVar[Mapping[str, Scale]] = {**CoreAttention.scales, "window": "length", "max_length": "length"}
    source: ClassVar[str] = "arXiv 1706.03762"
    ops: ClassVar[tuple[str, ...]] = ("softmax_attention",)

    @with_options_of(CoreAttention, without=("core",))
    def __init__(self, *place: int, window: int | None = None, **options: Any) -> None:
        super().__init__(*place, core=SoftmaxCore(window), **options)


class Top1Mixer(CoreAttention):
    """The common part of both Top-1 mixers: queries and keys of unit length, as published, and real relations only.

    Args:
        position: "rope", "none" or a class of `PositionEncoding`.
        qk_norm: whether queries and keys are normalised to unit length (before RoPE).
        **options: as in `CoreAttention`.
    """

    family: ClassVar[str] = "top1"

    @with_options_of(CoreAttention, without=("relation", "max_length"))
    def __init__(
        self,
        *place: int,
        position: Literal["rope", "none"] | Callable[[int, int, int], PositionEncoding] = "rope",
        qk_norm: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*place, position=position, qk_norm=qk_norm, **options)


class Top1Element(Top1Mixer):
    """Each query head takes the value of its highest-scoring key; straight-through gradient.

    Args:
        n_heads: query heads H.
        **options: as in `Top1Mixer`.
    """

    source: ClassVar[str] = "arXiv 2505.18522, section 4"
    ops: ClassVar[tuple[str, ...]] = ("top1_element_attention",)

    @with_options_of(Top1Mixer, without=("core",))
    def __init__(self, *place: int, **options: Any) -> None:
        super().__init__(*place, core=Top1ElementCore(), **options)


class Top1Chunk(Top1Mixer):
    """Each query head attends to its own chunk and to one earlier chunk that it selects, or to several.

    More than one remote chunk goes beyond the source, in the direction of MoBA (arXiv 2502.13189). More than 8 cost as
    much as dense attention.

    Args:
        n_heads: query heads H.
        chunk_size: tokens in a chunk, C.
        selection: "exact": the chunk with the largest attention mass; "approx": the one whose mean key fits best.
        remote_chunks: earlier chunks that a query selects; fewer where there are fewer.
        **options: as in `Top1Mixer`.
    """

    scales: ClassVar[Mapping[str, Scale]] = {**CoreAttention.scales, "chunk_size": "length"}
    source: ClassVar[str] = "arXiv 2505.18522, section 5"
    ops: ClassVar[tuple[str, ...]] = ("top1_chunk_attention",)

    @with_options_of(Top1Mixer, without=("core",))
    def __init__(
        self,
        *place: int,
        chunk_size: Count = CHUNK_SIZE,
        selection: Selection = "exact",
        remote_chunks: Count = 1,
        **options: Any,
    ) -> None:
        core = Top1ChunkCore(chunk_size, selection, remote_chunks=remote_chunks)
        super().__init__(*place, core=core, **options)


def _key_convolution(channels: int, size: int | None) -> ShortConvolution | None:
    if size is not None and not channels:
        raise UserError(f"key_conv={size} convolves real keys: leave it out, or set relation to real")
    return optional_convolution(channels, size, size is not None)
