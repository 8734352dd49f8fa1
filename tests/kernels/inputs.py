"""Random arguments of each op, by name and in order, as tests and benchmarks need them: `OF_OPS`.

Sizes have the letters of the op's docstring. All makers take the `dtype` of activations, `device` and `seed`. Wide
tensors are float32, or float64 for float64 activations. A seed gives the same numbers on every device; with None they
are drawn on the device, as large tensors need. Tensors ask for gradients.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Arguments = dict[str, Any]


class Numbers:
    """Random numbers, and the tensors that are made of them."""

    def __init__(self, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int | None = 0) -> None:
        self.dtype, self.device = dtype, device
        self.like: dict[str, Any] = {"device": device}
        if seed is not None:
            self.like = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, **self.like)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, **self.like)

    def leaves(self, *wide: str, **tensors: Tensor | None) -> Arguments:
        """The tensors in the dtype of activations; those named in `wide` have at least float32."""
        wider = torch.promote_types(self.dtype, torch.float32)
        return {
            name: None if t is None else t.to(self.device, wider if name in wide else self.dtype).requires_grad_()
            for name, t in tensors.items()
        }


def attention(
    B: int = 2, Tq: int = 63, H: int = 4, D: int = 16, *, Tk: int | None = None, HK: int | None = None,
    normalised: bool = False, **options: Any,
) -> Arguments:  # fmt: skip
    """q, k and v; with `normalised` q and k of unit length."""
    numbers = Numbers(**options)
    q, k, v = (numbers.normal(B, T, heads, D) for T, heads in ((Tq, H), (Tk or Tq, HK or H), (Tk or Tq, HK or H)))
    if normalised:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return numbers.leaves(q=q, k=k, v=v)


def queries_and_keys(*sizes: int, **options: Any) -> Arguments:
    """As `attention`, without values."""
    return {name: t for name, t in attention(*sizes, **options).items() if name != "v"}


def decoding(
    B: int = 2, capacity: int = 150, H: int = 4, D: int = 16, *, HK: int | None = None, **options: Any
) -> Arguments:
    """One query per sequence, caches and their lengths; no gradients."""
    drawn = attention(B, 1, H, D, Tk=capacity, HK=HK, normalised=True, **options)
    q, k, v = (t.detach() for t in drawn.values())
    lengths = torch.full((B,), capacity, dtype=torch.int32, device=q.device)
    return {"q": q, "k_cache": k, "v_cache": v, "lengths": lengths}


def delta_rule(
    B: int = 2, T: int = 70, H: int = 3, K: int = 8, V: int = 6, *, decay: float | None = None, states: int = 0,
    **options: Any,
) -> Arguments:  # fmt: skip
    """Keys of unit length; with `decay` logarithms of about `-decay`, with `states` that many initial states."""
    numbers = Numbers(**options)
    q, k = (F.normalize(numbers.normal(B, T, H, K), dim=-1) for _ in range(2))
    v, beta = numbers.normal(B, T, H, V), numbers.normal(B, T, H).sigmoid() * 1.5
    log_decay = None if decay is None else -decay * numbers.normal(B, T, H).exp()
    state = numbers.normal(states, H, K, V) if states else None
    wide = "beta", "log_decay", "initial_state"
    return numbers.leaves(*wide, q=q, k=k, v=v, beta=beta, log_decay=log_decay, initial_state=state)


def rwkv6(
    B: int = 2, T: int = 70, H: int = 2, K: int = 8, V: int = 6, *, strength: float = 1.0, **options: Any
) -> Arguments:
    """Decays `exp(-exp(strength * normal))`."""
    numbers = Numbers(**options)
    r, k, v = numbers.normal(B, T, H, K), numbers.normal(B, T, H, K), numbers.normal(B, T, H, V)
    log_decay = -torch.exp(strength * numbers.normal(B, T, H, K))
    return numbers.leaves("log_decay", "bonus", r=r, k=k, v=v, log_decay=log_decay, bonus=numbers.normal(H, K))


def rwkv7(
    B: int = 2, T: int = 70, H: int = 2, K: int = 8, V: int = 6, *, strength: float | None = None, **options: Any
) -> Arguments:
    """Decays as in the mixer, or `exp(-exp(strength * normal))`."""
    numbers = Numbers(**options)
    r, k, w, removal, rate = (numbers.normal(B, T, H, K) for _ in range(5))
    removal = F.normalize(removal, dim=-1)
    log_decay = -math.exp(-0.5) * w.sigmoid() if strength is None else -torch.exp(strength * w)
    v, b = numbers.normal(B, T, H, V), removal * rate.sigmoid()
    return numbers.leaves("log_decay", r=r, k=k, v=v, log_decay=log_decay, a=-removal, b=b)


def gated_delta_rule2(
    B: int = 2, T: int = 70, H: int = 2, K: int = 8, V: int = 6, *, strength: float = 0.5, **options: Any
) -> Arguments:
    """Queries and keys of unit length; logarithms of decays of about `-strength`."""
    numbers = Numbers(**options)
    q, k = (F.normalize(numbers.normal(B, T, H, K), dim=-1) for _ in range(2))
    v, erase = numbers.normal(B, T, H, V), numbers.normal(B, T, H, K).sigmoid()
    log_decay = -2 * strength * numbers.uniform(B, T, H, K)
    return numbers.leaves("log_decay", q=q, k=k, v=v, log_decay=log_decay, erase=erase)


def taylor(B: int = 2, T: int = 70, H: int = 3, K: int = 8, V: int = 6, **options: Any) -> Arguments:
    numbers = Numbers(**options)
    return numbers.leaves(q=numbers.normal(B, T, H, K), k=numbers.normal(B, T, H, K), v=numbers.normal(B, T, H, V))


def ssd(
    B: int = 2, T: int = 150, H: int = 4, P: int = 6, G: int = 1, N: int = 5, *, decay: str = "full", **options: Any
) -> Arguments:
    """Steps and decays as a new Mamba-2 has them: of A ("full"), one per token ("one") or none ("none")."""
    numbers = Numbers(**options)
    x, B_, C = numbers.normal(B, T, H, P), numbers.normal(B, T, G, N), numbers.normal(B, T, G, N)
    dt = F.softplus(numbers.normal(B, T, H) - 3)
    A = -16 * numbers.uniform(H)
    arguments = {"x": x, "dt": dt, "A": A if decay == "full" else None, "B": B_, "C": C}
    if decay == "one":
        arguments["log_decay"] = -F.softplus(numbers.normal(B, T, 1) - 2)
    return numbers.leaves("dt", "A", "log_decay", **arguments)


def selective_scan(
    B: int = 2, T: int = 70, d: int = 6, N: int = 4, *, decay: str = "full", step: float = -2.0, **options: Any
) -> Arguments:
    """Rates and decays as a new Mamba-1 has them, see `ssd`; steps of about `softplus(step)`."""
    numbers = Numbers(**options)
    dt = F.softplus(numbers.normal(B, T, d) + step)
    A = -torch.arange(1, N + 1, device=dt.device) * (1 + 0.1 * numbers.normal(d, N))
    x, B_, C, D = numbers.normal(B, T, d), numbers.normal(B, T, N), numbers.normal(B, T, N), numbers.normal(d)
    arguments = {"x": x, "dt": dt, "A": A if decay == "full" else None, "B": B_, "C": C, "D": D}
    arguments["log_decay"] = -0.3 * numbers.uniform(B, T) if decay == "one" else None
    return numbers.leaves("dt", "A", "D", "log_decay", **arguments)


def short_convolution(
    B: int = 2, T: int = 70, C: int = 24, W: int = 4, *, bias: bool = True, **options: Any
) -> Arguments:
    numbers = Numbers(**options)
    x, weight = numbers.normal(B, T, C), numbers.normal(C, W)
    return numbers.leaves("weight", "bias", x=x, weight=weight, bias=numbers.normal(C) if bias else None)


def qkv_convolution(
    B: int = 2, T: int = 70, H: int = 2, K: int = 8, V: int = 6, W: int = 4, **options: Any
) -> Arguments:
    drawn = short_convolution(B, T, H * (2 * K + V), W, bias=False, **options)
    return {"x": drawn["x"], "weight": drawn["weight"], "n_heads": H, "key_dim": K}


def gated_norm(B: int = 2, T: int = 70, H: int = 2, P: int = 8, **options: Any) -> Arguments:
    numbers = Numbers(**options)
    y, x, D = numbers.normal(B, T, H, P), numbers.normal(B, T, H, P), numbers.normal(H)
    z, weight = numbers.normal(B, T, H * P), numbers.normal(H * P)
    return numbers.leaves("D", "weight", y=y, x=x, D=D, z=z, weight=weight)


def linear_cross_entropy(N: int = 63, V: int = 50, d: int = 16, **options: Any) -> Arguments:
    numbers = Numbers(**options)
    targets = (V * numbers.uniform(N)).long().to(numbers.device)
    return {**numbers.leaves(hidden=numbers.normal(N, d), weight=numbers.normal(V, d)), "targets": targets}


OF_OPS = {
    "attention_decode": decoding,
    "attention_entropy": queries_and_keys,
    "delta_rule": delta_rule,
    "gated_delta_rule2": gated_delta_rule2,
    "gated_rms_norm": gated_norm,
    "linear_cross_entropy": linear_cross_entropy,
    "qkv_convolution": qkv_convolution,
    "rwkv6": rwkv6,
    "rwkv7": rwkv7,
    "select_chunks": queries_and_keys,
    "selective_scan": selective_scan,
    "short_convolution": short_convolution,
    "softmax_attention": attention,
    "ssd": ssd,
    "taylor_linear_attention": taylor,
    "top1_chunk_attention": attention,
    "top1_chunk_decode": decoding,
    "top1_element_attention": attention,
}
"""Draws the arguments of an op of `seqarch.kernels.OPS`."""
