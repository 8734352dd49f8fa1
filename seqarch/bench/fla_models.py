"""Times flash-linear-attention's published models at the sizes of our 110M recipes, without compiling them.

On an H100 or H200, fla's kernels choose among the settings that won there (`seqarch.kernels.fla_tuning`), as in
our recipes.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from seqarch.bench.jobs import Row
from seqarch.bench.training_step import Precision, draw_tokens, time_training
from seqarch.errors import UserError, refused
from seqarch.kernels.fla_tuning import fla_module


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """A model of `fla.models`: `CLASSForCausalLM` of `CLASSConfig(**options)`.

    Args:
        model: the class, without `ForCausalLM`.
        options: options of its config in addition to `SHARED`, or in place of some of these.
        needs: modules that the model needs to train, or to train without a slow stand-in, each with its package.
    """

    model: str
    options: dict[str, Any]
    needs: dict[str, str] = dataclasses.field(default_factory=dict)


def _mamba_ssm(module: str) -> dict[str, str]:
    """What training through a module of mamba-ssm needs: it calls causal-conv1d's kernel."""
    return {f"mamba_ssm.ops.{module}": "mamba-ssm", "causal_conv1d": "causal-conv1d"}


SHARED: dict[str, Any] = {"hidden_size": 768, "vocab_size": 32000, "tie_word_embeddings": True, "num_hidden_layers": 12}
COUNTERPARTS = {
    "transformer_pp_110m": Counterpart("Transformer", {"num_heads": 12}, {"flash_attn": "flash-attn"}),
    "delta_net_110m": Counterpart("DeltaNet", {"num_heads": 8}),
    "gated_delta_net_110m": Counterpart("GatedDeltaNet", {"num_heads": 6, "head_dim": 96}),
    "rwkv6_110m": Counterpart("RWKV6", {"num_heads": 12, "expand_k": 1.0}),
    "rwkv7_110m": Counterpart("RWKV7", {"head_dim": 64}),
    "mamba1_110m": Counterpart("Mamba", {"num_hidden_layers": 24}, _mamba_ssm("selective_scan_interface")),
    "mamba2_110m": Counterpart("Mamba2", {"num_hidden_layers": 24}, _mamba_ssm("triton.ssd_combined")),
}
"""By recipe. fla has no model of RWKV-5 and none of Based."""
PRECISIONS: tuple[Precision, ...] = ("bf16-mixed", "bf16-true")
"""Both are timed: fla's own training casts weights to bf16 and keeps float32 copies, which lies between the two."""


def build(name: str) -> nn.Module:
    """The counterpart of a recipe, with new weights."""
    counterpart = COUNTERPARTS[name]
    models = fla_module("fla.models", spread=None)
    config = getattr(models, f"{counterpart.model}Config")(**{**SHARED, **counterpart.options})
    return getattr(models, f"{counterpart.model}ForCausalLM")(config)


def time_model(name: str, micro_batch_size: int, sequence_length: int, steps: int, precision: Precision) -> Row:
    """The row of a recipe's counterpart, on the GPU.

    Args:
        name: the recipe.
        micro_batch_size: sequences.
        sequence_length: tokens.
        steps: steps to time after the first.
        precision: "bf16-mixed" keeps float32 weights under autocast, "bf16-true" casts all weights.

    Raises:
        UserError: a package or the GPU is missing.
    """
    if not torch.cuda.is_available():
        raise UserError("--against fla needs an NVIDIA GPU, and PyTorch sees none here")
    check_packages(name)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    model = build(name).to(device, torch.bfloat16 if precision == "bf16-true" else None).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss_of(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens[:, :-1], labels=tokens[:, :-1], use_cache=False).loss  # it shifts the labels

    tokens = draw_tokens(SHARED["vocab_size"], micro_batch_size, sequence_length, device)
    row = time_training(loss_of, optimizer, tokens, steps, precision)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"name": name, "model": type(model).__name__, "parameters": parameters, **row}


def check_packages(name: str) -> None:
    """Raise `UserError` if the counterpart of a recipe could not run as published."""
    counterpart = COUNTERPARTS[name]
    _require("fla.models", "--against fla", "flash-linear-attention", "pip install flash-linear-attention")
    packages = list(counterpart.needs.values())
    # packages with compiled code need the installed torch, not another one
    install = f"pip install --no-build-isolation {' '.join(packages)}"
    for module in counterpart.needs:
        _require(module, f"fla's {counterpart.model}", " and ".join(packages), install)


def _require(module: str, who: str, packages: str, install: str) -> None:
    with refused(f"{who} needs {packages} ({install})", ImportError, why=True):
        fla_module(module, spread=None)  # imports any package; only settings of fla's kernels are recorded
