"""Train small models with mixers of the zoo for 20 steps each on a GPU, and write a row for each as CSV.

    python plugins/seqarch-zoo/benchmarks/train.py rows.csv MLSTM FlaLayer:HGRN2Attention ...

Two layers of width 512, 8 x 1,024 bytes of the embedded corpus's Python files per step, bf16 autocast, blocks compiled.
Without a GPU it runs uncompiled, to be tried out.
Several such processes may share a GPU: they compile at the same time and take turns with the steps that are timed.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import functools
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from seqarch_zoo.fla_layer import FlaLayer
from seqarch_zoo.gated_associative import GatedAssociative
from seqarch_zoo.gated_attention import GatedAttention
from seqarch_zoo.kimi_delta_attention import KimiDeltaAttention
from seqarch_zoo.mamba3 import Mamba3
from seqarch_zoo.mesa_net import MesaNet
from seqarch_zoo.mlstm import MLSTM
from seqarch_zoo.s4d import DLR, S4D
from seqarch_zoo.ttt_linear import TTTLinear

from seqarch.data.corpus import collect_python
from seqarch.errors import one_line
from seqarch.model import GeGLU, SequenceLM

WIDTH, LAYERS, ROWS, LENGTH, STEPS = 512, 2, 8, 1024, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "DLR": (DLR, {}),
    "GatedAssociative": (GatedAssociative, {}),
    "GatedAttention": (GatedAttention, {"n_heads": 8}),
    "KimiDeltaAttention": (KimiDeltaAttention, {"n_heads": 8}),
    "MLSTM": (MLSTM, {"n_heads": 4}),
    "Mamba3": (Mamba3, {}),
    "Mamba3-MIMO": (Mamba3, {"rank": 2}),
    "MesaNet": (MesaNet, {"n_heads": 8}),
    "S4D": (S4D, {}),
    "TTTLinear": (TTTLinear, {"n_heads": 8}),
}
LAYER_OPTIONS: dict[str, dict[str, Any]] = {
    "Comba": {"num_heads": 4, "head_dim": 64},
    "ForgettingAttention": {"num_heads": 8},
    "GatedDeltaProduct": {"num_heads": 4, "head_dim": 64},
    "KimiDeltaAttention": {"num_heads": 8, "head_dim": 64},
    "LinearAttention": {"num_heads": 8},
    "LogLinearMamba2": {"num_heads": 16},
    "MesaNet": {"num_heads": 8, "head_dim": 64},
    "PaTHAttention": {"num_heads": 8},
    "StickBreakingAttention": {"num_heads": 8},
}


def batches(count: int) -> torch.Tensor:
    """`[count, ROWS, LENGTH + 1]` bytes of Python files."""
    needed, text = count * ROWS * (LENGTH + 1), b""
    for _, file in collect_python(lambda function, items: map(function, items)):
        text += file.encode()
        if len(text) >= needed:
            break
    return torch.frombuffer(bytearray(text[:needed]), dtype=torch.uint8).long().view(count, ROWS, LENGTH + 1)


def train(name: str, tokens: torch.Tensor, lock: Path) -> dict[str, Any]:
    kind, options = MIXERS.get(name, (FlaLayer, {}))
    if kind is FlaLayer:
        layer = name.partition(":")[2]
        options = {"layer": layer, "options": LAYER_OPTIONS.get(layer, {})}
    torch.manual_seed(0)
    mixers: dict[str, Any] = {"mixer": functools.partial(kind, **options)}
    lm = SequenceLM(257, WIDTH, LAYERS, mixers, feed_forward=GeGLU).to(DEVICE)
    mixer: Any = lm.blocks[0].mixer
    parameters = sum(parameter.numel() for parameter in mixer.parameters())
    if DEVICE == "cuda":
        lm.compile_parts()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, fused=True)

    def step(batch: torch.Tensor) -> float:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = lm(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    begun = time.perf_counter()
    losses = [step(tokens[0]), step(tokens[1])]
    start_up, seconds = time.perf_counter() - begun, []
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for batch in tokens[2:]:
            begun = time.perf_counter()
            losses.append(step(batch))
            seconds.append(time.perf_counter() - begun)
    return {
        "parameters": parameters,
        "start_up_s": round(start_up, 1),
        "tokens_per_s": round(ROWS * LENGTH / statistics.median(seconds)),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "loss_first": round(losses[0], 3),
        "loss_last": round(losses[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("mixers", nargs="+")
    arguments = parser.parse_args()
    path, names = arguments.rows, arguments.mixers
    tokens = batches(STEPS).to(DEVICE)
    columns: Any = ("mixer", "parameters", "start_up_s", "tokens_per_s", "peak_gib", "loss_first", "loss_last", "error")
    for name in names:
        torch.compiler.reset()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            row: dict[str, Any] = train(name, tokens, path.with_name("timing.lock"))
        except Exception as error:  # a separate row says what went wrong
            traceback.print_exc()
            row = {"error": one_line(error)[:200]}
        print(name, row, flush=True)
        with path.open("a", newline="") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            writer = csv.DictWriter(file, columns)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({"mixer": name, **row})


if __name__ == "__main__":
    main()
