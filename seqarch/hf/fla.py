"""Families of flash-linear-attention whose weights fit seqarch's own layers: DeltaNet, Gated DeltaNet and RWKV-7.

RWKV-7's authors publish one file without a configuration (github.com/BlinkDL/RWKV-LM): `of_rwkv` reads it as fla's.
"""

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from seqarch.errors import UserError
from seqarch.hf.rules import (
    NAMES,
    Config,
    Family,
    Layout,
    Options,
    Rule,
    embedding_rules,
    hidden_width,
    the_mixer,
    to_ours,
    to_theirs,
)
from seqarch.mixers.rwkv7 import published_rank

SHARED = {**NAMES, "norm_eps": "norm_eps"}
BLOCK, LAYER = "lm.blocks.{i}.", "model.layers.{i}."
RANKS = {"decay": "decay", "rate": "a", "value": "v", "gate": "gate"}
"""fla's names of RWKV-7's ranks."""
LOW_RANK = {"decay": "w", "rate": "a", "value_gate": "v", "gate": "g"}
"""fla's letters of RWKV-7's low-rank parts."""


def _model(c: Config, mixer: str, options: Options) -> dict[str, Any]:
    """What all of fla's models share."""
    return {
        **to_ours(c, SHARED, tie_word_embeddings=False, norm_eps=1e-5),
        "mixers": {"mixer": {"class_path": mixer, "init_args": dict(options)}},
    }


def _config(model: Options) -> dict[str, Any]:
    """`_model` reversed."""
    return {**to_theirs(model, SHARED), "intermediate_size": hidden_width(model)}


def _key_dim(c: Config, *, decays: bool) -> float:
    """The size of each head's keys."""
    return c.get("head_dim", 256) if decays else c["hidden_size"] * c.get("expand_k", 1.0) / c["num_heads"]


def _delta_options(c: Config, *, decays: bool) -> dict[str, Any]:
    if c.get("num_v_heads") not in (None, c["num_heads"]):
        raise UserError(f"config.json has num_v_heads {c['num_v_heads']}: seqarch computes num_heads, {c['num_heads']}")
    mixer: dict[str, Any] = {
        "n_heads": c["num_heads"],
        "head_dim": round(_key_dim(c, decays=decays)),
        "expand_v": c.get("expand_v", 2.0) if decays else c.get("expand_v", 1.0) / c.get("expand_k", 1.0),
        "gate": c.get("use_gate", decays),
        "conv": c.get("use_short_conv", True),
        "neg_eigval": c.get("allow_neg_eigval", False),
        "norm_eps": c.get("norm_eps", 1e-6),
    }
    if mixer["conv"]:
        mixer["conv_size"] = c.get("conv_size", 4)
    hidden = c.get("intermediate_size") or 256 * -(-int(c["hidden_size"] * c.get("hidden_ratio", 4) * 2 / 3) // 256)
    return {
        **_model(c, "GatedDeltaNet" if decays else "DeltaNet", mixer),
        "norm_eps": mixer["norm_eps"],
        "feed_forward": {"class_path": "SwiGLU", "init_args": {"hidden": hidden}},
    }


def _delta_rules(c: Config, *, decays: bool) -> list[Rule]:
    keys = round(c["num_heads"] * _key_dim(c, decays=decays))
    width = keys if decays else c["hidden_size"]
    values = round(width * c.get("expand_v", 2.0 if decays else 1.0))
    sizes = (keys, keys, values)
    rules = embedding_rules("model.embeddings.weight", "model.norm", c.get("tie_word_embeddings", False))
    joined: dict[str, tuple[str, Layout]] = {"mixer.qkv": ("proj", "same")}
    if c.get("use_short_conv", True):
        joined["mixer.convolution"] = ("conv1d", "depthwise")
    for ours, (kind, layout) in joined.items():
        theirs = tuple(f"{LAYER}attn.{part}_{kind}.weight" for part in "qkv")
        rules.append(Rule(f"{BLOCK}{ours}.weight", theirs, layout, sizes))
    single = {"mixer.beta": "attn.b_proj", "mixer.norm": "attn.o_norm", "mixer.out": "attn.o_proj"}
    single |= {"mixer_norm": "attn_norm", "feed_forward_norm": "mlp_norm"}
    single |= {f"feed_forward.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    single |= {"mixer.gate": "attn.g_proj"} if c.get("use_gate", decays) else {}
    single |= {"mixer.step_size": "attn.a_proj"} if decays else {}
    rules += [Rule(f"{BLOCK}{ours}.weight", (f"{LAYER}{theirs}.weight",)) for ours, theirs in single.items()]
    own = ("A_log", "dt_bias") if decays else ()
    return rules + [Rule(f"{BLOCK}mixer.{name}", (f"{LAYER}attn.{name}",)) for name in own]


def _delta_config(model: Options, *, decays: bool) -> dict[str, Any]:
    mixer = the_mixer(model, "GatedDeltaNet" if decays else "DeltaNet")
    heads, width = mixer["n_heads"], model["d_model"]
    key_dim = mixer["head_dim"] or round((0.75 if decays else 1) * width / heads)
    share = key_dim * heads / width
    sizes = {"head_dim": key_dim} if decays else {"expand_k": share}
    return {
        **_config(model),
        **sizes,
        "num_heads": heads,
        "expand_v": mixer["expand_v"] * (1 if decays else share),
        "use_gate": mixer["gate"],
        "use_short_conv": mixer["conv"],
        "conv_size": mixer["conv_size"] or 4,
        "allow_neg_eigval": mixer["neg_eigval"],
    }


def _delta(model_type: str, name: str, *, decays: bool) -> Family:
    fixed: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("swish", "silu"),
        "attn": (None,),
        "attnres_block_size": (None,),
        "conv_bias": (False,),
        "output_gate_activation": ("swish", "silu"),
        "use_beta": (True,),
        "use_output_norm": (True,),
        "qk_norm": ("l2",),
        "qk_activation": ("silu",),
    }
    return Family(
        model_type,
        f"{name}ForCausalLM",
        fixed,
        partial(_delta_options, decays=decays),
        partial(_delta_rules, decays=decays),
        partial(_delta_config, decays=decays),
        package="fla",
    )


def _rwkv7_options(c: Config) -> dict[str, Any]:
    width, eps = c["hidden_size"], c.get("norm_eps", 1e-5)
    head_dim = c.get("head_dim") or width // c["num_heads"]
    if not math.isclose(head_dim * eps, 64e-5, rel_tol=1e-6):
        raise UserError(f"config.json has heads of {head_dim} and norm_eps {eps}: seqarch computes 64 and 1e-05")
    if {*_several(c.get("value_dim"))} - {None, width}:
        raise UserError(f"config.json has value_dim {c['value_dim']}: seqarch computes hidden_size, {width}")
    ranks = {f"{ours}_rank": c[f"{theirs}_low_rank_dim"] for ours, theirs in RANKS.items()}
    hidden = c.get("intermediate_size") or 32 * -(-int(width * (c.get("hidden_ratio") or 4)) // 32)
    return {
        **_model(c, "RWKV7", {"n_heads": width // head_dim, **ranks}),
        "norm": "layernorm",
        "embedding_norm": True,
        "feed_forward": {"class_path": "RWKVChannelMix", "init_args": {"hidden": hidden}},
    }


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _rwkv7_rules(c: Config) -> list[Rule]:
    rules = embedding_rules("model.embeddings.weight", "model.norm", c.get("tie_word_embeddings", False), bias=True)
    norms = {"mixer_norm": "attn_norm", "feed_forward_norm": "ffn_norm", "mixer.norm": "attn.g_norm"}
    pairs = {f"{BLOCK}{ours}": f"{LAYER}{theirs}" for ours, theirs in norms.items()}
    pairs["lm.embedding_norm"] = "model.layers.0.pre_norm"
    rules += [Rule(f"{ours}.{of}", (f"{theirs}.{of}",)) for ours, theirs in pairs.items() for of in ("weight", "bias")]
    projections = {f"mixer.{name}": f"attn.{name[0]}_proj" for name in ("receptance", "key", "value", "output")}
    projections |= {f"feed_forward.{name}": f"ffn.{name}" for name in ("key", "value")}
    rules += [Rule(f"{BLOCK}{ours}.weight", (f"{LAYER}{theirs}.weight",)) for ours, theirs in projections.items()]
    vectors = {"mixer.removal_scale": "attn.k_k", "mixer.rate_scale": "attn.k_a", "mixer.bonus": "attn.r_k"}
    vectors["feed_forward.mix"] = "ffn.x_k"
    rules += [Rule(f"{BLOCK}{ours}", (f"{LAYER}{theirs}",)) for ours, theirs in vectors.items()]
    mixes = dict(zip(("receptance", "decay", "key", "value", "rate", "gate"), "rwkvag", strict=True))
    rules += [Rule(f"{BLOCK}mixer.{name}_mix", (f"{LAYER}attn.x_{of}",), "broadcast") for name, of in mixes.items()]
    for layer in range(c["num_hidden_layers"]):
        for ours, letter in LOW_RANK.items():
            if layer or ours != "value_gate":  # the first layer has no value residual
                rules += _low_rank(ours, letter, bias=ours != "gate", layer=layer)
    return rules


def _low_rank(ours: str, letter: str, *, bias: bool, layer: int) -> list[Rule]:
    pairs = {"down.weight": "0.weight", "up.weight": "2.weight", **({"up.bias": "2.bias"} if bias else {})}
    names = ((f"{BLOCK}mixer.{ours}.{a}", f"{LAYER}attn.{letter}_lora.lora.{b}") for a, b in pairs.items())
    return [Rule(mine, (theirs,)).of_layer(layer) for mine, theirs in names]


def _rwkv7_config(model: Options) -> dict[str, Any]:
    mixer, width = the_mixer(model, "RWKV7"), model["d_model"]
    default = {"decay": 1.8 * width**0.5, "rate": 1.8 * width**0.5, "value": 1.3 * width**0.5, "gate": 0.6 * width**0.8}
    ranks = {
        f"{theirs}_low_rank_dim": mixer[f"{ours}_rank"] or published_rank(default[ours])
        for ours, theirs in RANKS.items()
    }
    return {**_config(model), **ranks, "head_dim": width // mixer["n_heads"]}


DELTA_FAMILIES = (_delta("delta_net", "DeltaNet", decays=False), _delta("gated_deltanet", "GatedDeltaNet", decays=True))
RWKV7_FAMILY = Family(
    "rwkv7",
    "RWKV7ForCausalLM",
    {"hidden_act": ("sqrelu",), "norm_first": (True,), "norm_bias": (True,), "attn": (None,)},
    _rwkv7_options,
    _rwkv7_rules,
    _rwkv7_config,
    package="fla",
)

_ORIGINAL: tuple[tuple[str, str, Layout], ...] = (
    (r"emb\.", "model.embeddings.", "same"),
    (r"head\.", "lm_head.", "same"),
    (r"ln_out\.", "model.norm.", "same"),
    (r"blocks\.(\d+)\.ln0\.", r"model.layers.\1.pre_norm.", "same"),
    (r"blocks\.(\d+)\.ln1\.", r"model.layers.\1.attn_norm.", "same"),
    (r"blocks\.(\d+)\.ln2\.", r"model.layers.\1.ffn_norm.", "same"),
    (r"blocks\.(\d+)\.att\.ln_x\.", r"model.layers.\1.attn.g_norm.", "same"),
    (r"blocks\.(\d+)\.att\.([rkvo])[a-z]+\.", r"model.layers.\1.attn.\2_proj.", "same"),
    (r"blocks\.(\d+)\.att\.(x_[a-z]|r_k)$", r"model.layers.\1.attn.\2", "same"),
    (r"blocks\.(\d+)\.att\.(k_[ka])$", r"model.layers.\1.attn.\2", "broadcast"),
    (r"blocks\.(\d+)\.att\.([wavg])0$", r"model.layers.\1.attn.\2_lora.lora.2.bias", "broadcast"),
    (r"blocks\.(\d+)\.att\.([wavg])1$", r"model.layers.\1.attn.\2_lora.lora.0.weight", "transposed"),
    (r"blocks\.(\d+)\.att\.([wavg])2$", r"model.layers.\1.attn.\2_lora.lora.2.weight", "transposed"),
    (r"blocks\.(\d+)\.ffn\.x_k$", r"model.layers.\1.ffn.x_k", "broadcast"),
    (r"blocks\.(\d+)\.ffn\.", r"model.layers.\1.ffn.", "same"),
)
"""The names of RWKV-7's authors, what fla calls them, and how the authors lay them out."""
_UNUSED = re.compile(r"blocks\.0\.att\.v[012]")
"""Tensors that the authors' code does not read."""


def of_rwkv(weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors, in fla's names, of a file of RWKV-7's authors.

    Raises:
        UserError: the file holds another model.
    """
    layers = {int(found[1]) for name in weights if (found := re.match(r"blocks\.(\d{1,4})\.", name))}
    needed = ["emb.weight", "blocks.0.ffn.key.weight", "blocks.0.att.r_k"]
    ranks = {"decay": "0.att.w1", "a": "0.att.a1", "v": "1.att.v1", "gate": "0.att.g1"}
    needed += [f"blocks.{each}" for each in ranks.values()]
    if missing := [name for name in needed if name not in weights or weights[name].ndim != 2]:
        raise UserError(f"the file is not one of RWKV-7 with two layers or more: it lacks the matrix {missing[0]}")
    config = {
        "model_type": RWKV7_FAMILY.model_type,
        "vocab_size": weights["emb.weight"].shape[0],
        "hidden_size": weights["emb.weight"].shape[1],
        "num_hidden_layers": len(layers),
        "head_dim": weights["blocks.0.att.r_k"].shape[1],
        "intermediate_size": weights["blocks.0.ffn.key.weight"].shape[0],
        **{f"{name}_low_rank_dim": weights[f"blocks.{each}"].shape[1] for name, each in ranks.items()},
    }
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if _UNUSED.fullmatch(name):
            continue
        for pattern, theirs, layout in _ORIGINAL:
            new, count = re.subn(f"^{pattern}", theirs, name)
            if count:
                renamed |= {new: Rule("", (), layout).to_ours([tensor])}
                break
        else:
            raise UserError(f"the weights hold {name}, which the family has not")
    return config, renamed
