"""Published families whose weights fit seqarch's own layers: GPT-2, Llama and its relatives, Mamba-1 and Mamba-2."""

import math
from typing import Any, ClassVar

from seqarch.errors import UserError, check_known
from seqarch.hf.fla import RWKV7, DeltaNet, GatedDeltaNet
from seqarch.hf.rules import BLOCK, NAMES, Config, Entries, Family, Fixed, Options, Rule

SCALED = "seqarch.mixers.positions.ScaledRoPE"


class GPT2(Family):
    model_type, architecture, mixer = "gpt2", "GPT2LMHeadModel", "Attention"
    names: ClassVar[Entries] = {
        **{"vocab_size": "vocab_size", "d_model": "n_embd", "n_layers": "n_layer"},
        **{"learned_positions": "n_positions", "norm_eps": "layer_norm_epsilon"},
    }
    fixed: ClassVar[Fixed] = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }
    mixer_names: ClassVar[Entries] = {"n_heads": "n_head"}
    always: ClassVar[Entries] = {"norm": "layernorm"}
    feed_forward, hidden = "GELUMLP", "n_inner"
    layer, prefix = "transformer.h.{i}.", "transformer."
    dropped = (".attn.bias", ".attn.masked_bias")

    def complete(self, c: Config) -> dict[str, Any]:
        return {**c, "n_inner": c.get("n_inner") or 4 * c["n_embd"]}

    def mixer_options(self, c: Config) -> dict[str, Any]:
        return {"position": "none", "bias": True}

    def rules(self, c: Config) -> list[Rule]:
        matrices = {"mixer.qkv": "attn.c_attn", "mixer.out": "attn.c_proj"}
        matrices |= {"feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}
        return [
            *self.around(c, "transformer.wte", "transformer.ln_f", bias=True),
            Rule("lm.positions.weight", ("transformer.wpe.weight",)),
            *self.in_layers({"mixer_norm": "ln_1", "feed_forward_norm": "ln_2"}, ".weight", ".bias"),
            *self.in_layers(matrices, ".weight", ".bias", layout="transposed"),
        ]


class Llama(Family):
    model_type, architecture, mixer = "llama", "LlamaForCausalLM", "Attention"
    names: ClassVar[Entries] = {**NAMES, "norm_eps": "rms_norm_eps"}
    mixer_names: ClassVar[Entries] = {
        **{"n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    }
    fixed: ClassVar[Fixed] = {
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
        "use_sliding_window": (False,),
        "layer_types": (None, "full_attention"),
    }
    feed_forward = "SwiGLU"
    dropped = ("rotary_emb.inv_freq",)
    bias: ClassVar[bool | str] = False
    """Which projections have one, unless `config.json` says so."""
    qk_norm: ClassVar[bool] = False

    def complete(self, c: Config) -> dict[str, Any]:
        heads = c["num_attention_heads"]
        sizes = {"head_dim": c.get("head_dim") or c["hidden_size"] // heads}
        return {**super().complete(c), **sizes, "num_key_value_heads": c.get("num_key_value_heads") or heads}

    def mixer_options(self, c: Config) -> dict[str, Any]:
        norm = {"qk_norm": "weighted", "qk_norm_eps": c["rms_norm_eps"]} if self.qk_norm else {}
        return {"bias": self.bias or bool(c.get("attention_bias", False)), **_rope(c), **norm}

    def mixer_config(self, mixer: Options, width: int) -> dict[str, Any]:
        bias = {} if self.bias else {"attention_bias": mixer["bias"] is True}
        return {"rope_parameters": _rope_parameters(mixer), **bias}

    def rules(self, c: Config) -> list[Rule]:
        heads = (c["num_attention_heads"], c["num_key_value_heads"], c["num_key_value_heads"])
        sizes = tuple(count * c["head_dim"] for count in heads)
        bias = self.bias or bool(c.get("attention_bias", False))
        rules = self.around(c, "model.embed_tokens", "model.norm")
        for kind in ("weight", "bias") if bias else ("weight",):
            joined = tuple(f"{self.layer}self_attn.{part}_proj.{kind}" for part in "qkv")
            rules.append(Rule(f"{BLOCK}mixer.qkv.{kind}", joined, sizes=sizes))
        rules += self.in_layers(
            {"mixer.out": "self_attn.o_proj"}, *((".weight", ".bias") if bias is True else (".weight",))
        )
        others = {"mixer_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
        others |= {f"feed_forward.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
        if self.qk_norm:
            others |= {"mixer.attend.norms.0": "self_attn.q_norm", "mixer.attend.norms.1": "self_attn.k_norm"}
        return rules + self.in_layers(others, ".weight")


class Mistral(Llama):
    model_type, architecture = "mistral", "MistralForCausalLM"
    mixer_names: ClassVar[Entries] = {**Llama.mixer_names, "window": "sliding_window"}
    fixed: ClassVar[Fixed] = {
        **{key: values for key, values in Llama.fixed.items() if key != "layer_types"},
        "attention_bias": (False,),  # of which transformers' Mistral knows nothing
    }


class Qwen2(Llama):
    model_type, architecture, bias = "qwen2", "Qwen2ForCausalLM", "qkv"


class Qwen3(Llama):
    model_type, architecture, qk_norm = "qwen3", "Qwen3ForCausalLM", True


def _rope(c: Config) -> dict[str, Any]:
    """The options of positions; `rope_parameters` is the newer form of `rope_theta` and `rope_scaling`."""
    length = c.get("max_position_embeddings")
    rope = {"rope_theta": c.get("rope_theta", 10000.0), "original_max_position_embeddings": length}
    rope |= c.get("rope_scaling") or c.get("rope_parameters") or {}
    kind, base = rope.get("rope_type") or rope.get("type") or "default", float(rope["rope_theta"])
    if kind == "default":
        return {"rope_base": base}
    if kind not in ("linear", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"config.json has rope_type '{kind}': seqarch computes default, linear or llama3, whole heads")
    options: dict[str, Any] = {"base": base, "factor": float(rope["factor"]), "rule": kind}
    if kind == "llama3":
        options |= {"low": float(rope["low_freq_factor"]), "high": float(rope["high_freq_factor"])}
        options["original_length"] = rope["original_max_position_embeddings"]
    return {"position": {"class_path": SCALED, "init_args": options}}


def _rope_parameters(attention: Options) -> dict[str, Any]:
    """`rope_parameters` of an attention's options."""
    position = attention["position"]
    if isinstance(position, str):
        return {"rope_type": "default", "rope_theta": attention["rope_base"]}
    options = position["init_args"]
    parameters = {"rope_type": options.get("rule"), "rope_theta": options.get("base"), "factor": options.get("factor")}
    if options.get("rule") == "llama3":
        parameters |= {"low_freq_factor": options["low"], "high_freq_factor": options["high"]}
        parameters["original_max_position_embeddings"] = options["original_length"]
    return parameters


class Mamba(Family):
    model_type, architecture, mixer = "mamba", "MambaForCausalLM", "Mamba1"
    names: ClassVar[Entries] = {**NAMES, "norm_eps": "layer_norm_epsilon", "residual_in_fp32": "residual_in_fp32"}
    mixer_names: ClassVar[Entries] = {
        **{"d_state": "state_size", "expand": "expand", "conv_size": "conv_kernel", "dt_rank": "time_step_rank"}
    }
    defaults: ClassVar[Entries] = {"tie_word_embeddings": True}  # which transformers 5.0 does not declare
    fixed: ClassVar[Fixed] = {"hidden_act": ("silu",), "use_bias": (False,), "use_conv_bias": (True,)}
    layer = "backbone.layers.{i}."
    projections: ClassVar[tuple[str, ...]] = ("in_proj", "out_proj", "x_proj", "dt_proj")
    own: ClassVar[Entries] = {"mixer.dt_bias": "mixer.dt_proj.bias"}

    def complete(self, c: Config) -> dict[str, Any]:
        inner = c["expand"] * c["hidden_size"]
        if c.get("intermediate_size", inner) != inner:
            raise UserError(f"config.json has intermediate_size {c['intermediate_size']}: seqarch computes {inner}")
        return {**super().complete(c), "conv_kernel": c["conv_kernel"] or 4}

    def mixer_config(self, mixer: Options, width: int) -> dict[str, Any]:
        rank = math.ceil(width / 16) if mixer["dt_rank"] == "auto" else mixer["dt_rank"]
        return {"intermediate_size": mixer["expand"] * width, "time_step_rank": rank}

    def rules(self, c: Config) -> list[Rule]:
        vectors = {"mixer.A_log": "mixer.A_log", "mixer.D": "mixer.D", "mixer.convolution.bias": "mixer.conv1d.bias"}
        return [
            *self.around(c, "backbone.embeddings", "backbone.norm_f"),
            *self.in_layers({**vectors, **self.own}, ""),
            *self.in_layers(
                {"mixer_norm": "norm", **{f"mixer.{one}": f"mixer.{one}" for one in self.projections}}, ".weight"
            ),
            *self.in_layers({"mixer.convolution": "mixer.conv1d"}, ".weight", layout="depthwise"),
        ]


class Mamba2(Mamba):
    model_type, architecture, mixer = "mamba2", "Mamba2ForCausalLM", "Mamba2"
    mixer_names: ClassVar[Entries] = {
        **{"d_state": "state_size", "expand": "expand", "conv_size": "conv_kernel"},
        **{"head_dim": "head_dim", "n_groups": "n_groups"},
    }
    fixed: ClassVar[Fixed] = {
        **Mamba.fixed,
        "n_groups": (1,),  # transformers up to 5.16 norms all groups together
        "layer_norm_epsilon": (1e-5,),  # our gated norm's
        "time_step_limit": ((0.0, math.inf), [0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
    }
    projections = ("in_proj", "out_proj")
    own: ClassVar[Entries] = {"mixer.dt_bias": "mixer.dt_bias", "mixer.norm_weight": "mixer.norm.weight"}

    def complete(self, c: Config) -> dict[str, Any]:
        inner = c["expand"] * c["hidden_size"]
        if c["num_heads"] * c["head_dim"] != inner:
            raise UserError(f"config.json has num_heads {c['num_heads']}: seqarch computes {inner // c['head_dim']}")
        return super().complete({**c, "intermediate_size": inner})

    def mixer_config(self, mixer: Options, width: int) -> dict[str, Any]:
        return {"num_heads": mixer["expand"] * width // mixer["head_dim"]}


KINDS = (GPT2, Llama, Mistral, Qwen2, Qwen3, Mamba, Mamba2, DeltaNet, GatedDeltaNet, RWKV7)
FAMILIES: dict[str, Family] = {kind.model_type: kind() for kind in KINDS}


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
