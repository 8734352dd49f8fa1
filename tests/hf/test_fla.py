"""Families of flash-linear-attention and RWKV-7's own file: equal logits here, and back in fla's names.

fla's kernels need a GPU. On a CPU its model code runs with its own references in place of the kernels; where it has
none (norms, convolution, SwiGLU), with the formula.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("fla.models")

import fla.models

import seqarch
from seqarch import cli
from seqarch.errors import UserError
from seqarch.hf.families import FAMILIES
from seqarch.hf.fla import Fla
from seqarch.hf.imports import import_model

SIZES = {"num_hidden_layers": 2, "vocab_size": 300, "fuse_norm": False, "fuse_cross_entropy": False}
DELTA = {**SIZES, "hidden_size": 64, "fuse_swiglu": False}
RANKS = {"decay_low_rank_dim": 64, "a_low_rank_dim": 64, "v_low_rank_dim": 32, "gate_low_rank_dim": 128}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "delta_net-1.3b": ("DeltaNet", {**DELTA, "num_heads": 4}),
    "delta_net, all options": ("DeltaNet", {**DELTA, "num_heads": 2, "expand_k": 0.5, "use_gate": True, "conv_size": 3,
                                            "allow_neg_eigval": True, "tie_word_embeddings": True, "norm_eps": 1e-5}),
    "delta_net without convolution": ("DeltaNet", {**DELTA, "num_heads": 2, "use_short_conv": False}),
    "gated_deltanet-1.3b": ("GatedDeltaNet", {**DELTA, "num_heads": 3, "head_dim": 16}),
    "gated_deltanet, no gate": ("GatedDeltaNet", {**DELTA, "num_heads": 2, "head_dim": 8, "expand_v": 1.0,
                                                  "use_gate": False, "intermediate_size": 80}),
    "rwkv7-168m": ("RWKV7", {**SIZES, "hidden_size": 128, "head_dim": 64, **RANKS}),
}  # fmt: skip
"""Class and configuration: ratios, epsilons and tying of published sizes at a smaller width."""


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def convolution(x, weight, bias=None, activation=None, **options):
    y = F.conv1d(F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(weight))
    return (F.silu(y) if activation else y).transpose(1, 2), None


def rms_norm(self, x, g=None):
    normed = F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
    return normed if g is None else normed * F.silu(g)


def delta_rule(q, k, v, beta, **options):
    from fla.ops.delta_rule.naive import delta_rule_recurrence

    q, k, v, beta = (each.transpose(1, 2) for each in (unit(q), unit(k), v, beta))
    o, state = delta_rule_recurrence(q, k, v, beta)
    return o.transpose(1, 2), state


def gated_delta_rule(q, k, v, g, beta, A_log, dt_bias, **options):
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    return naive_recurrent_gated_delta_rule(unit(q), unit(k), v, beta.sigmoid(), naive_gdn_gate(g, A_log, dt_bias))


def rwkv7(r, w, k, v, a, b, **options):
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence

    q = r * r.shape[-1] ** 0.5  # which it divides by
    o, state = dplr_recurrence(*(each.transpose(1, 2) for each in (q, k, v, a, b, w)))
    return o.transpose(1, 2), state


def token_shift(x, *rest, **options):
    from fla.modules.token_shift import token_shift_ref

    return token_shift_ref(x), None


@pytest.mark.parametrize("family", [each for each in FAMILIES.values() if isinstance(each, Fla)])
def test_an_entry_that_config_json_lacks_is_the_default_of_fla(family):
    theirs = getattr(fla.models, family.architecture.replace("ForCausalLM", "Config"))().to_dict()
    ours = {**{key: values[0] for key, values in family.fixed.items()}, **family.defaults}
    assert ours == {key: theirs.get(key, value) for key, value in ours.items()}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A device on which fla's models run: on a CPU with references in place of its kernels."""
    if request.param == "cpu":
        from fla.modules.activations import ACT2FN
        from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
        from fla.ops.rwkv7.fused_k_update import k_update_ref
        from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref

        for place, replacement in {
            "layers.delta_net.chunk_delta_rule": delta_rule,
            "layers.gated_deltanet.chunk_gated_delta_rule": gated_delta_rule,
            "layers.gated_deltanet.causal_conv1d": convolution,
            "modules.causal_conv1d.ops.causal_conv1d": convolution,
            "modules.RMSNorm.forward": rms_norm,
            "modules.FusedRMSNormGated.forward": rms_norm,
            "modules.mlp.swiglu": lambda gate, up: F.silu(gate) * up,
            "layers.rwkv7.chunk_rwkv7": rwkv7,
            "layers.rwkv7.fused_addcmul_rwkv7": torch_addcmul_rwkv7,
            "layers.rwkv7.fused_k_rwkv7": k_update_ref,
            "layers.rwkv7.gate_output_correction": gate_output_correction_ref,
            "layers.rwkv7.token_shift": token_shift,
            "models.rwkv7.modeling_rwkv7.token_shift": token_shift,
        }.items():
            monkeypatch.setattr(f"fla.{place}", replacement)
        monkeypatch.setitem(ACT2FN, "sqrelu", lambda x: F.relu(x).square())
    return request.param


def drawn(device: str) -> Tensor:
    """Tokens. On a GPU they are few enough for fla's recurrent kernels, which compute in float32; up to 64 are."""
    return torch.randint(0, 300, (2, 60 if device == "cuda" else 70), device=device)


def published(name, folder, device="cpu") -> Any:
    """A model of fla with random weights that all matter, in a folder."""
    kind, options = PUBLISHED[name]
    model = getattr(fla.models, f"{kind}ForCausalLM")(getattr(fla.models, f"{kind}Config")(**options))
    for key, weight in model.named_parameters():
        if not key.endswith(("A_log", "dt_bias")):
            weight.data.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return model.eval().to(device)


@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_logits_are_those_of_fla_and_export_gives_its_tensors_back(name, device, tmp_path):
    theirs = published(name, tmp_path / "published", device)
    run = import_model(tmp_path / "published", tmp_path / "run", tokenizer="byte")
    tokens = drawn(device)
    expected = theirs(tokens).logits
    torch.testing.assert_close(seqarch.load(run)[0].cpu()(tokens.cpu()), expected.cpu(), atol=1e-4, rtol=1e-4)
    cli.run(["export", str(run), "--out", str(tmp_path / "back"), "--as", theirs.config.model_type])
    kernels = dict.fromkeys(("fuse_norm", "fuse_swiglu"), False)
    config = type(theirs.config).from_pretrained(tmp_path / "back", **kernels)
    back = type(theirs).from_pretrained(tmp_path / "back", config=config).eval().to(device)
    assert back.config.architectures == [type(theirs).__name__]
    assert torch.equal(back(tokens).logits, expected)


def in_the_authors_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """RWKV-7's tensors as its authors name and lay them out, with the three of the first layer that are not read."""
    found = {}
    for name, tensor in weights.items():
        new = name
        for theirs, own in {
            "model.layers.": "blocks.", "model.embeddings": "emb", "model.norm": "ln_out",
            "pre_norm": "ln0", "attn_norm": "ln1", "ffn_norm": "ln2", "attn.": "att.", "g_norm": "ln_x",
            "r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output", "lm_head": "head",
            "_lora.lora.2.bias": "0", "_lora.lora.0.weight": "1", "_lora.lora.2.weight": "2",
        }.items():  # fmt: skip
            new = new.replace(theirs, own)
        if new[-1] in "12" and tensor.ndim == 2:
            tensor = tensor.T.contiguous()
        found[new] = tensor[None, None] if tensor.ndim == 1 and not new.endswith(("weight", "bias")) else tensor
    unread = {f"blocks.0.att.v{part}": found[f"blocks.1.att.v{part}"] for part in "012"}
    return {name: each.bfloat16() for name, each in (found | unread).items()}


@torch.no_grad()
def test_the_file_of_rwkv7s_authors_is_read(device, tmp_path):
    theirs = published("rwkv7-168m", tmp_path / "published").bfloat16().float()
    file = tmp_path / "RWKV-x070-Pile-168M.pth"
    torch.save(in_the_authors_names(theirs.state_dict()), file)
    assert torch.load(file)["blocks.1.att.w1"].shape == (128, 64)
    assert torch.load(file)["blocks.0.att.k_k"].shape == (1, 1, 128)
    with pytest.raises(UserError, match=r"comes without a tokenizer: name one with --tokenizer"):
        import_model(file, tmp_path / "run")
    lm = seqarch.load(import_model(file, tmp_path / "run", tokenizer="byte"))[0].cpu()
    tokens = drawn(device)
    torch.testing.assert_close(lm(tokens.cpu()), theirs.to(device)(tokens).logits.cpu(), atol=1e-4, rtol=1e-4)


def test_another_file_is_refused(tmp_path):
    file = tmp_path / "other.pth"
    torch.save({"emb.weight": torch.zeros(3, 4)}, file)
    with pytest.raises(UserError, match=r"it lacks the matrix blocks\.0\.ffn\.key"):
        import_model(file, tmp_path / "run", tokenizer="byte")


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("delta_net-1.3b", {"qk_norm": "sum"}, "qk_norm 'sum': seqarch computes l2"),
        ("delta_net-1.3b", {"use_beta": False}, "use_beta False"),
        ("delta_net-1.3b", {"attn": {"layers": [0]}}, "attn {'layers'"),
        ("gated_deltanet-1.3b", {"num_v_heads": 6}, "num_v_heads 6: seqarch computes 3"),
        ("gated_deltanet-1.3b", {"output_gate_activation": "sigmoid"}, "output_gate_activation 'sigmoid'"),
        ("gated_deltanet-1.3b", {"attnres_block_size": 2}, "attnres_block_size 2"),
        ("rwkv7-168m", {"norm_eps": 1e-6}, "heads of 64 and norm_eps 1e-06: seqarch computes 64 and 1e-05"),
        ("rwkv7-168m", {"value_dim": [128, 256]}, "value_dim"),
        ("rwkv7-168m", {"gate_low_rank_dim": 64}, r"g_lora\.lora"),
    ],
)
def test_what_seqarch_does_not_compute_is_refused_by_name(name, config, said, tmp_path):
    published(name, tmp_path / "published")
    path = tmp_path / "published/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(UserError, match=said):
        import_model(tmp_path / "published", tmp_path / "run", tokenizer="byte")
    assert not (tmp_path / "run").exists()
