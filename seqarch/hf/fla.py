"""Families of flash-linear-attention whose weights fit seqarch's own layers: DeltaNet, Gated DeltaNet and RWKV-7.

RWKV-7's authors publish one file without a configuration (github.com/BlinkDL/RWKV-LM): `of_rwkv` reads it as fla's.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedConfig

from seqarch.errors import UserError, several
from seqarch.hf.rules import BLOCK, NAMES, Config, Entries, Family, Fixed, Layout, Options, Rule
from seqarch.mixers.rwkv7 import rank_at


class Fla(Family):
    """The shared part of fla's models."""

    names: ClassVar[Entries] = {**NAMES, "norm_eps": "norm_eps"}
    defaults: ClassVar[Entries] = {"tie_word_embeddings": False, "norm_eps": 1e-5}

    def declared(self) -> dict[str, Any]:
        return {}  # fla need not be installed

    def config_class(self) -> type[PreTrainedConfig]:
        return type("PublishedConfig", (PreTrainedConfig,), {"model_type": self.model_type})

    def around(
        self, config: Config, embedding: str = "model.embeddings", norm: str = "model.norm", **how: bool
    ) -> list[Rule]:
        return super().around(config, embedding, norm, **how)


class DeltaNet(Fla):
    model_type, architecture, mixer = "delta_net", "DeltaNetForCausalLM", "DeltaNet"
    fixed: ClassVar[Fixed] = {
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
    defaults: ClassVar[Entries] = {
        **{"tie_word_embeddings": False, "norm_eps": 1e-6, "expand_k": 1.0, "expand_v": 1.0, "hidden_ratio": 4},
        **{"use_gate": False, "use_short_conv": True, "conv_size": 4, "allow_neg_eigval": False},
    }
    mixer_names: ClassVar[Entries] = {
        **{"n_heads": "num_heads", "gate": "use_gate", "conv": "use_short_conv"},
        **{"neg_eigval": "allow_neg_eigval", "norm_eps": "norm_eps"},
    }
    feed_forward = "SwiGLU"

    def complete(self, c: Config) -> dict[str, Any]:
        c = super().complete(c)
        if c.get("num_v_heads") not in (None, c["num_heads"]):
            raise UserError(f"config.json has num_v_heads {c['num_v_heads']}: seqarch computes {c['num_heads']}")
        hidden = c.get("intermediate_size") or 256 * -(-int(c["hidden_size"] * c["hidden_ratio"] * 2 / 3) // 256)
        return {**c, "intermediate_size": hidden}

    def sizes(self, c: Config) -> dict[str, Any]:
        """The size of each head's keys, and that of its values over it."""
        head_dim = round(c["hidden_size"] * c["expand_k"] / c["num_heads"])
        return {"head_dim": head_dim, "expand_v": c["expand_v"] / c["expand_k"]}

    def mixer_options(self, c: Config) -> dict[str, Any]:
        return {**self.sizes(c), **({"conv_size": c["conv_size"]} if c["use_short_conv"] else {})}

    def mixer_config(self, mixer: Options, width: int) -> dict[str, Any]:
        share = (mixer["head_dim"] or round(width / mixer["n_heads"])) * mixer["n_heads"] / width
        return {"expand_k": share, "expand_v": mixer["expand_v"] * share, "conv_size": mixer["conv_size"] or 4}

    def rules(self, c: Config) -> list[Rule]:
        keys = c["num_heads"] * self.sizes(c)["head_dim"]
        sizes = (keys, keys, round(keys * self.sizes(c)["expand_v"]))
        rules = self.around(c)
        joined: dict[str, tuple[str, Layout]] = {"mixer.qkv": ("proj", "same")}
        if c["use_short_conv"]:
            joined["mixer.convolution"] = ("conv1d", "depthwise")
        for ours, (kind, layout) in joined.items():
            theirs = tuple(f"{self.layer}attn.{part}_{kind}.weight" for part in "qkv")
            rules.append(Rule(f"{BLOCK}{ours}.weight", theirs, layout, sizes))
        single = {"mixer.beta": "attn.b_proj", "mixer.norm": "attn.o_norm", "mixer.out": "attn.o_proj"}
        single |= {"mixer_norm": "attn_norm", "feed_forward_norm": "mlp_norm"}
        single |= {f"feed_forward.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
        single |= {"mixer.gate": "attn.g_proj"} if c["use_gate"] else {}
        return rules + self.in_layers(single, ".weight")


class GatedDeltaNet(DeltaNet):
    model_type, architecture, mixer = "gated_deltanet", "GatedDeltaNetForCausalLM", "GatedDeltaNet"
    defaults: ClassVar[Entries] = {**DeltaNet.defaults, "head_dim": 256, "expand_v": 2.0, "use_gate": True}

    def sizes(self, c: Config) -> dict[str, Any]:
        return {"head_dim": c["head_dim"], "expand_v": c["expand_v"]}

    def mixer_config(self, mixer: Options, width: int) -> dict[str, Any]:
        head_dim = mixer["head_dim"] or round(0.75 * width / mixer["n_heads"])
        return {"head_dim": head_dim, "expand_v": mixer["expand_v"], "conv_size": mixer["conv_size"] or 4}

    def rules(self, c: Config) -> list[Rule]:
        own = {"mixer.A_log": "attn.A_log", "mixer.dt_bias": "attn.dt_bias"}
        steps = self.in_layers({"mixer.step_size": "attn.a_proj"}, ".weight")
        return [*super().rules(c), *steps, *self.in_layers(own, "")]


class RWKV7(Fla):
    model_type, architecture, mixer = "rwkv7", "RWKV7ForCausalLM", "RWKV7"
    fixed: ClassVar[Fixed] = {"hidden_act": ("sqrelu",), "norm_first": (True,), "norm_bias": (True,), "attn": (None,)}
    ranks: ClassVar[Entries] = {"decay": "decay", "rate": "a", "value": "v", "gate": "gate"}
    """fla's names of the ranks."""
    low_rank: ClassVar[Entries] = {"decay": "w", "rate": "a", "value_gate": "v", "gate": "g"}
    """fla's letters of the low-rank parts."""

    always: ClassVar[Entries] = {"norm": "layernorm", "embedding_norm": True}
    feed_forward = "RWKVChannelMix"

    def complete(self, c: Config) -> dict[str, Any]:
        c, width = super().complete(c), c["hidden_size"]
        head_dim, eps = c.get("head_dim") or width // c["num_heads"], c["norm_eps"]
        if not math.isclose(head_dim * eps, 64e-5, rel_tol=1e-6):
            raise UserError(f"config.json has heads of {head_dim} and norm_eps {eps}: seqarch computes 64 and 1e-05")
        if {*several(c.get("value_dim"))} - {None, width}:
            raise UserError(f"config.json has value_dim {c['value_dim']}: seqarch computes hidden_size, {width}")
        hidden = c.get("intermediate_size") or 32 * -(-int(width * (c.get("hidden_ratio") or 4)) // 32)
        return {**c, "head_dim": head_dim, "intermediate_size": hidden}

    def mixer_options(self, c: Config) -> dict[str, Any]:
        ranks = {f"{ours}_rank": c[f"{theirs}_low_rank_dim"] for ours, theirs in self.ranks.items()}
        return {"n_heads": c["hidden_size"] // c["head_dim"], **ranks}

    def mixer_config(self, mixer: Options, width: int) -> dict[str, Any]:
        shares = {"decay": (1.8, 0.5), "rate": (1.8, 0.5), "value": (1.3, 0.5), "gate": (0.6, 0.8)}
        ranks = {
            f"{theirs}_low_rank_dim": mixer[f"{ours}_rank"] or rank_at(*shares[ours], width)
            for ours, theirs in self.ranks.items()
        }
        return {**ranks, "head_dim": width // mixer["n_heads"]}

    def rules(self, c: Config) -> list[Rule]:
        first = [Rule(f"lm.embedding_norm.{of}", (f"model.layers.0.pre_norm.{of}",)) for of in ("weight", "bias")]
        norms = {"mixer_norm": "attn_norm", "feed_forward_norm": "ffn_norm", "mixer.norm": "attn.g_norm"}
        projections = {f"mixer.{name}": f"attn.{name[0]}_proj" for name in ("receptance", "key", "value", "output")}
        projections |= {f"feed_forward.{name}": f"ffn.{name}" for name in ("key", "value")}
        vectors = {"mixer.removal_scale": "attn.k_k", "mixer.rate_scale": "attn.k_a", "mixer.bonus": "attn.r_k"}
        letters = {"receptance": "r", "decay": "w", "key": "k", "value": "v", "rate": "a", "gate": "g"}
        mixes = {f"mixer.{name}_mix": f"attn.x_{letter}" for name, letter in letters.items()}
        return [
            *self.around(c, bias=True),
            *self.in_layers(norms, ".weight", ".bias"),
            *first,
            *self.in_layers(projections, ".weight"),
            *self.in_layers({**vectors, "feed_forward.mix": "ffn.x_k"}, ""),
            *self.in_layers(mixes, "", layout="broadcast"),
            *(rule for layer in range(c["num_hidden_layers"]) for rule in self.low_rank_rules(layer)),
        ]

    def low_rank_rules(self, layer: int) -> list[Rule]:
        """The rules of a layer's low-rank parts; the first layer has no value residual."""
        names: dict[str, str] = {}
        for ours, letter in self.low_rank.items():
            if layer or ours != "value_gate":
                parts = {"down.weight": "0.weight", "up.weight": "2.weight", "up.bias": "2.bias"}
                parts = {a: b for a, b in parts.items() if ours != "gate" or a != "up.bias"}
                names |= {f"mixer.{ours}.{a}": f"attn.{letter}_lora.lora.{b}" for a, b in parts.items()}
        return [rule.of_layer(layer) for rule in self.in_layers(names, "")]


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
        "model_type": RWKV7.model_type,
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
