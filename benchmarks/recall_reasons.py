"""Trains what may explain the recall of linear attention: its norm, its convolution and its precision.

    OMP_NUM_THREADS=1 python benchmarks/recall_reasons.py RUNS docs/results/recall/reasons.csv [SEED ...]

The models are those of the recall exam `mqar` at size `tiny` with one head and 8 features, and variants of them. RUNS
keeps a file for each run. The script makes what is missing and writes the CSV.
"""

import json
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from seqarch_recall.model import RecallLM, derived
from seqarch_recall.settings import Settings, find_settings
from seqarch_recall.train import Learner, train
from torch import Tensor, nn

from seqarch.mixers.base import Mixer, init_linear
from seqarch.mixers.based import GatedConvolution
from seqarch.mixers.registry import load_mixer
from seqarch.mixers.short_convolution import ShortConvolution
from seqarch.tables import write_csv

WIDTH, LENGTH, OPTIONS = 32, 32, {"n_heads": 1, "feature_dim": 8}


class Variant(NamedTuple):
    """A model: its mixer, its norm, its convolution ("seqarch" or "zoology") and its precision."""

    mixer: str
    norm: Any
    convolution: str = "seqarch"
    precision: str = "fp32"


VARIANTS = (
    Variant("TaylorLinearAttention", "layernorm"),
    Variant("TaylorLinearAttention", "layernorm", precision="bf16"),
    Variant("TaylorLinearAttention", "layernorm", convolution="zoology"),
    Variant("TaylorLinearAttention", "rmsnorm"),
    Variant("Based", "layernorm"),
    Variant("Based", "rmsnorm"),
)
COLUMNS = [*Variant._fields, "seed", "accuracy", "rate", "epochs"]


class BaseConv(Mixer):
    """Zoology's convolution: `conv(x) * gate(x) + x`, without SiLU and without projections of its input and output."""

    def __init__(self, d_model: int, layer_idx: int, n_layers: int) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.gate = nn.Linear(d_model, d_model)
        init_linear(self.gate)
        self.convolution = ShortConvolution(d_model, 3, bias=True, activation=None)

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        return self.convolution(x, state=state, cu_seqlens=cu_seqlens) * self.gate(x) + x


class HalfPrecisionLM(RecallLM):
    """The model under autocast in bf16."""

    def answers(self, tokens: Tensor, places: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, cache_enabled=False):
            return super().answers(tokens, places)


def build(settings: Settings, variant: Variant) -> RecallLM:
    """The model of a variant, with the weights of the settings' seed."""
    torch.manual_seed(settings.seed)
    options = derived(settings, variant.mixer, WIDTH, LENGTH, OPTIONS)
    mixers: dict[str, Any] = {"mixer": partial(load_mixer(variant.mixer), **options)}
    if variant.mixer != "Based":
        mixers["conv"] = BaseConv if variant.convolution == "zoology" else partial(GatedConvolution, expand=1)
    model = HalfPrecisionLM if variant.precision == "bf16" else RecallLM
    return model(settings.vocab_size, WIDTH, 2, mixers, sorted(mixers), norm=variant.norm, dropout=settings.dropout)


def make(variant: Variant, seed: int, path: Path, **changes: Any) -> None:
    """Train a variant at each rate and write the best results."""
    settings = find_settings("mqar", "tiny", {"seed": seed, **changes})
    learners = [Learner(build(settings, variant), rate, settings.weight_decay) for rate in settings.rates]
    done = train(settings, learners, settings.testing(), path.with_suffix(".pt"), lambda _: None)
    row = [*variant, seed, f"{done.scores.accuracy:.4f}", done.rate, done.epochs]
    path.write_text(json.dumps(dict(zip(COLUMNS, map(str, row), strict=True))), encoding="utf-8")
    path.with_suffix(".pt").unlink()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    folder, target = map(Path, sys.argv[1:3])
    folder.mkdir(parents=True, exist_ok=True)
    for number, one in product(map(int, sys.argv[3:]), VARIANTS):
        if not (file := folder / f"{'-'.join(one)}-{number}.json").is_file():
            make(one, number, file)
    texts = (path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json")))
    write_csv(target, COLUMNS, [json.loads(text).values() for text in texts])
