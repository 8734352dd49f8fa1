"""Published families whose weights fit seqarch's own layers: GPT-2, Llama and its relatives, Mamba-1 and Mamba-2."""

import math
from functools import partial
from typing import Any

from seqarch.errors import UserError, check_known
from seqarch.hf.fla import DELTA_FAMILIES, RWKV7_FAMILY
from seqarch.hf.rules import (
    NAMES,
    Config,
    Family,
    Options,
    Rule,
    embedding_rules,
    hidden_width,
    the_mixer,
    to_ours,
    to_theirs,
)

SCALED = "seqarch.mixers.positions.ScaledRoPE"
GPT2_NAMES = {"vocab_size": "vocab_size", "d_model": "n_embd", "n_layers": "n_layer"}
GPT2_NAMES |= {"learned_positions": "n_positions", "norm_eps": "layer_norm_epsilon"}
LLAMA = {**NAMES, "norm_eps": "rms_norm_eps"}
MAMBA = {**NAMES, "norm_eps": "layer_norm_epsilon", "residual_in_fp32": "residual_in_fp32"}
MAMBA_MIXER = {"d_state": "state_size", "expand": "expand"}


def _gpt2_options(c: Config) -> dict[str, Any]:
    attention = {"n_heads": c["n_head"], "position": "none", "bias": True}
    return {
        **to_ours(c, GPT2_NAMES),
        "norm": "layernorm",
        "mixers": {"attention": {"class_path": "Attention", "init_args": attention}},
        "feed_forward": {"class_path": "GELUMLP", "init_args": {"hidden": c.get("n_inner") or 4 * c["n_embd"]}},
    }


def _gpt2_rules(c: Config) -> list[Rule]:
    rules = embedding_rules("transformer.wte.weight", "transformer.ln_f", True, bias=True)
    rules.append(Rule("lm.positions.weight", ("transformer.wpe.weight",)))
    layers = {"mixer_norm": "ln_1", "feed_forward_norm": "ln_2"}
    matrices = {
        "mixer.qkv": "attn.c_attn",
        "mixer.out": "attn.c_proj",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    }
    for ours, theirs in {**layers, **matrices}.items():
        for kind in ("weight", "bias"):
            layout = "transposed" if ours in matrices else "same"
            rules.append(Rule(f"lm.blocks.{{i}}.{ours}.{kind}", (f"transformer.h.{{i}}.{theirs}.{kind}",), layout))
    return rules


def _gpt2_config(model: Options) -> dict[str, Any]:
    heads = the_mixer(model, "Attention")["n_heads"]
    return {**to_theirs(model, GPT2_NAMES), "n_head": heads, "n_inner": hidden_width(model)}


def _rope(c: Config) -> dict[str, Any]:
    """The options of positions; `rope_parameters` is the newer form of `rope_theta` and `rope_scaling`."""
    old = {"rope_theta": c.get("rope_theta", 10000.0), **(c.get("rope_scaling") or {})}
    given = {**old, **(c.get("rope_parameters") or {})}
    kind, base = given.get("rope_type") or given.get("type") or "default", float(given["rope_theta"])
    if kind == "default":
        return {"rope_base": base}
    if kind not in ("linear", "llama3") or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"config.json has rope_type '{kind}': seqarch computes default, linear or llama3, whole heads")
    options: dict[str, Any] = {"base": base, "factor": float(given["factor"]), "rule": kind}
    if kind == "llama3":
        options |= {"low": float(given["low_freq_factor"]), "high": float(given["high_freq_factor"])}
        options["original_length"] = given["original_max_position_embeddings"]
    return {"position": {"class_path": SCALED, "init_args": options}}


def _rope_parameters(attention: Options) -> dict[str, Any]:
    """`rope_parameters` of an attention's options."""
    position = attention["position"]
    if isinstance(position, str):
        return {"rope_type": "default", "rope_theta": attention["rope_base"]}
    given = position["init_args"]
    parameters = {"rope_type": given.get("rule"), "rope_theta": given.get("base"), "factor": given.get("factor")}
    if given.get("rule") == "llama3":
        parameters |= {"low_freq_factor": given["low"], "high_freq_factor": given["high"]}
        parameters["original_max_position_embeddings"] = given["original_length"]
    return parameters


def _head_dim(c: Config) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def _llama_options(c: Config, *, bias: bool | str, qk_norm: bool, window: bool) -> dict[str, Any]:
    attention: dict[str, Any] = {
        "n_heads": c["num_attention_heads"],
        "n_kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": _head_dim(c),
        "bias": bias or bool(c.get("attention_bias", False)),
        **_rope(c),
    }
    if qk_norm:
        attention |= {"qk_norm": "weighted", "qk_norm_eps": c["rms_norm_eps"]}
    if window:
        attention["window"] = c.get("sliding_window")
    return {
        **to_ours(c, LLAMA, tie_word_embeddings=False),
        "mixers": {"attention": {"class_path": "Attention", "init_args": attention}},
        "feed_forward": {"class_path": "SwiGLU", "init_args": {"hidden": c["intermediate_size"]}},
    }


def _llama_rules(c: Config, *, bias: bool | str, qk_norm: bool) -> list[Rule]:
    block, layer = "lm.blocks.{i}.", "model.layers.{i}."
    heads, kv_heads = c["num_attention_heads"], c.get("num_key_value_heads") or c["num_attention_heads"]
    sizes = tuple(count * _head_dim(c) for count in (heads, kv_heads, kv_heads))
    rules = embedding_rules("model.embed_tokens.weight", "model.norm", c.get("tie_word_embeddings", False))
    bias = bias or bool(c.get("attention_bias", False))
    for kind in ("weight", "bias") if bias else ("weight",):
        joined = tuple(f"{layer}self_attn.{part}_proj.{kind}" for part in "qkv")
        rules.append(Rule(f"{block}mixer.qkv.{kind}", joined, sizes=sizes))
    for kind in ("weight", "bias") if bias is True else ("weight",):
        rules.append(Rule(f"{block}mixer.out.{kind}", (f"{layer}self_attn.o_proj.{kind}",)))
    others = {
        "mixer_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
        **{f"feed_forward.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }
    if qk_norm:
        others |= {"mixer.attend.norms.0": "self_attn.q_norm", "mixer.attend.norms.1": "self_attn.k_norm"}
    return rules + [Rule(f"{block}{ours}.weight", (f"{layer}{theirs}.weight",)) for ours, theirs in others.items()]


def _llama_config(model: Options, *, bias: bool | str, qk_norm: bool, window: bool) -> dict[str, Any]:
    attention = the_mixer(model, "Attention")
    config = {
        **to_theirs(model, LLAMA),
        "num_attention_heads": attention["n_heads"],
        "num_key_value_heads": attention["n_kv_heads"] or attention["n_heads"],
        "head_dim": attention["head_dim"] or model["d_model"] // attention["n_heads"],
        "intermediate_size": hidden_width(model),
        "rope_parameters": _rope_parameters(attention),
    }
    if not bias:
        config["attention_bias"] = attention["bias"] is True
    return {**config, "sliding_window": attention["window"]} if window else config


def _llama(
    model_type: str, name: str, *, bias: bool | str = False, qk_norm: bool = False, window: bool = False
) -> Family:
    fixed: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
        "use_sliding_window": (False,),
    }
    if not window:
        fixed["layer_types"] = (None, "full_attention")
    if qk_norm:
        fixed["attention_bias"] = (False,)
    return Family(
        model_type,
        f"{name}ForCausalLM",
        fixed,
        partial(_llama_options, bias=bias, qk_norm=qk_norm, window=window),
        partial(_llama_rules, bias=bias, qk_norm=qk_norm),
        partial(_llama_config, bias=bias, qk_norm=qk_norm, window=window),
        dropped=("rotary_emb.inv_freq",),
    )


def _mamba_options(c: Config, *, second: bool) -> dict[str, Any]:
    mixer = {**to_ours(c, MAMBA_MIXER), "conv_size": c["conv_kernel"]}
    inner = c["expand"] * c["hidden_size"]
    if second:
        mixer |= {"head_dim": c["head_dim"], "n_groups": c["n_groups"]}
        if c["num_heads"] * c["head_dim"] != inner:
            raise UserError(f"config.json has num_heads {c['num_heads']}: seqarch computes {inner // c['head_dim']}")
    else:
        mixer["dt_rank"] = c["time_step_rank"]
        if c.get("intermediate_size", inner) != inner:
            raise UserError(f"config.json has intermediate_size {c['intermediate_size']}: seqarch computes {inner}")
    return {
        **to_ours(c, MAMBA, tie_word_embeddings=True, residual_in_fp32=True),
        "feed_forward": None,
        "mixers": {"mamba": {"class_path": "Mamba2" if second else "Mamba1", "init_args": mixer}},
    }


def _mamba_rules(c: Config, *, second: bool) -> list[Rule]:
    block, layer = "lm.blocks.{i}.", "backbone.layers.{i}."
    tied = c.get("tie_word_embeddings", True)
    same = {"mixer.A_log": "A_log", "mixer.D": "D", "mixer.convolution.bias": "conv1d.bias"}
    same |= {f"mixer.{name}.weight": f"{name}.weight" for name in ("in_proj", "out_proj")}
    if second:
        same |= {"mixer.dt_bias": "dt_bias", "mixer.norm_weight": "norm.weight"}
    else:
        same |= {f"mixer.{name}.weight": f"{name}.weight" for name in ("x_proj", "dt_proj")}
        same["mixer.dt_bias"] = "dt_proj.bias"
    rules = [Rule(block + ours, (f"{layer}mixer.{theirs}",)) for ours, theirs in same.items()]
    rules.append(Rule(f"{block}mixer.convolution.weight", (f"{layer}mixer.conv1d.weight",), "depthwise"))
    rules.append(Rule(f"{block}mixer_norm.weight", (f"{layer}norm.weight",)))
    return [*embedding_rules("backbone.embeddings.weight", "backbone.norm_f", tied), *rules]


def _mamba_config(model: Options, *, second: bool) -> dict[str, Any]:
    mixer = the_mixer(model, "Mamba2" if second else "Mamba1")
    config = {**to_theirs(model, MAMBA), **to_theirs(mixer, MAMBA_MIXER), "conv_kernel": mixer["conv_size"] or 4}
    inner = mixer["expand"] * model["d_model"]
    if second:
        heads = {"num_heads": inner // mixer["head_dim"], "head_dim": mixer["head_dim"]}
        return {**config, **heads, "n_groups": mixer["n_groups"]}
    rank = mixer["dt_rank"]
    return {
        **config,
        "intermediate_size": inner,
        "time_step_rank": math.ceil(model["d_model"] / 16) if rank == "auto" else rank,
    }


def _mamba(model_type: str, name: str, *, second: bool) -> Family:
    fixed: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "use_bias": (False,), "use_conv_bias": (True,)}
    if second:  # transformers norms all groups together; our gated norm has this epsilon
        limits = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
        fixed |= {"n_groups": (1,), "layer_norm_epsilon": (1e-5,), "time_step_limit": limits}
    return Family(
        model_type,
        f"{name}ForCausalLM",
        fixed,
        partial(_mamba_options, second=second),
        partial(_mamba_rules, second=second),
        partial(_mamba_config, second=second),
    )


GPT2 = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
FAMILIES = {
    each.model_type: each
    for each in (
        Family(
            "gpt2", "GPT2LMHeadModel", GPT2, _gpt2_options, _gpt2_rules, _gpt2_config, "transformer.",
            (".attn.bias", ".attn.masked_bias"),
        ),
        _llama("llama", "Llama"),
        _llama("mistral", "Mistral", window=True),
        _llama("qwen2", "Qwen2", bias="qkv"),
        _llama("qwen3", "Qwen3", qk_norm=True),
        _mamba("mamba", "Mamba", second=False),
        _mamba("mamba2", "Mamba2", second=True),
        *DELTA_FAMILIES,
        RWKV7_FAMILY,
    )
}  # fmt: skip


def family(name: str) -> Family:
    """The family with a `model_type`.

    Raises:
        UserError: seqarch has no such layers.
    """
    check_known("family of models", name, FAMILIES)
    return FAMILIES[name]


def of_mamba_ssm(c: Config) -> dict[str, Any]:
    """The `config.json` of the package mamba-ssm in transformers' words.

    Raises:
        UserError: it has layers that neither of them computes.
    """
    layers = dict(c.get("ssm_cfg") or {})
    second = layers.pop("layer", "Mamba1") == "Mamba2"
    if c.get("attn_layer_idx") or c.get("d_intermediate") or not c.get("rms_norm", True):
        raise UserError("config.json has attention, feed-forward layers or LayerNorm: seqarch reads plain Mamba models")
    multiple = c.get("pad_vocab_size_multiple", 8)
    width, head_dim = c["d_model"], layers.pop("headdim", 64)
    config = {
        "model_type": "mamba2" if second else "mamba",
        "vocab_size": -(-c["vocab_size"] // multiple) * multiple,
        "hidden_size": width,
        "num_hidden_layers": c["n_layer"],
        "state_size": layers.pop("d_state", 128 if second else 16),
        "expand": layers.pop("expand", 2),
        "conv_kernel": layers.pop("d_conv", 4),
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": c.get("residual_in_fp32", True),
        "tie_word_embeddings": c.get("tie_embeddings", True),
    }
    if second:
        heads = config["expand"] * width // head_dim
        config |= {"head_dim": head_dim, "num_heads": heads, "n_groups": layers.pop("ngroups", 1)}
    else:
        config["time_step_rank"] = layers.pop("dt_rank", "auto")
    if layers:
        raise UserError(f"config.json has ssm_cfg.{min(layers)}: seqarch computes its default only")
    return config
