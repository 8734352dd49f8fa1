"""Times exact selection for small and large scores, on random vectors and on vectors of trained models.

    python -m benchmarks.kernels.trained CHECKPOINT TEXT --out recorded.pt --length 102400
    python -m benchmarks.kernels trained --recorded recorded.pt

The first command records queries, keys and values of a model with attention layers while it reads a text.
"""

import argparse
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.script import run
from seqarch.arguments import COUNT
from seqarch.bench.jobs import Row
from seqarch.errors import UserError, absent
from seqarch.kernels.blocks import expand_heads
from seqarch.kernels.top1_chunk.op import mean_keys
from seqarch.mixers.cores import AttentionCore
from seqarch.runs.files import atomic, read_text
from seqarch.training.checkpoint import read_tensors

BLOCK = 64
"""Queries per program of the exact selection. The program visits each chunk that any of these queries needs."""
FP8 = 1.0625**2 - 1
"""Relative error of a product of two numbers, each rounded to e4m3 (three bits of mantissa)."""
RANDOM = "random vectors"


def record(checkpoint: Path, text: Path, out: Path, length: int, layers: int = 4, heads: int = 4) -> None:
    """Write q, k, v `[1, T, H, D]` and the scale of the first attention layers and heads of a model, on one text.

    Raises:
        UserError: the model has no attention layer, the text has fewer than `length` tokens, or a file does not exist.
    """
    COUNT.check("--length", length)
    if not text.is_file():
        raise absent("file", text, "name a file of text")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder: name a file to write")
    from seqarch.experiment.load import load

    lm, tokenizer = load(checkpoint)
    tokens = torch.tensor(tokenizer.encode(read_text(text))[:length])
    if len(tokens) < length:
        raise UserError(f"{text} has {len(tokens)} tokens, fewer than the {length} to record")
    found: list[dict[str, Any]] = []

    def keep(core: AttentionCore, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        q, k, v = (expand_heads(t, args[0].shape[2]) for t in args)
        found.append({"qkv": [t[:, :, :heads].bfloat16().cpu() for t in (q, k, v)], "scale": kwargs["scale"]})

    cores = {module for module in lm.modules() if isinstance(module, AttentionCore)}
    for core in cores:
        core.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        lm(tokens.to(lm.embedding.weight.device)[None], last_only=True)
    if not found:
        raise UserError(f"the model of {checkpoint} has no attention layer to record")
    with atomic(out) as unfinished, unfinished.open("wb") as file:
        torch.save(found[:layers], file)


def samples(
    recorded: Path | None, shapes: tuple[tuple[int, int, int], ...]
) -> Iterator[tuple[str, list[Tensor], float]]:
    """Name, q, k, v and scale: random unit vectors of each (T, H, D) at four scales, then the recorded ones."""
    from tests.kernels import inputs

    for T, H, D in shapes:
        drawn = inputs.attention(1, T, H, D, normalised=True, dtype=torch.bfloat16, seed=0).values()
        for scale in (D**-0.5, 1.0, D**0.5, 16.0):
            yield RANDOM, [t.detach() for t in drawn], scale
    if recorded is not None:
        for layer, each in enumerate(read_tensors(recorded)):
            yield f"recorded layer {layer}", each["qkv"], each["scale"]


@torch.no_grad()
def shares(q: Tensor, k: Tensor, scale: float, chunk_size: int) -> Row:
    """Shares of the earlier chunks that bounds leave to compute, per query and per block of 64 queries.

    Args:
        q, k: `[1, T, H, D]`.
        scale: factor on the scores.
        chunk_size: keys per chunk, C.

    Returns:
        `mean` for the kernels' bound by mean keys and covariances, `max` for the bound by row maxima, that is
        exp(max) <= mass <= C exp(max), and `fp8` for masses from products of queries and keys rounded to e4m3, which
        are off by at most `scale |q| |k| FP8` in each score. Each also comes with `_block`.
    """
    T, n = q.shape[1], q.shape[1] // chunk_size
    q, k = q[0].float().transpose(0, 1), k[:, : n * chunk_size].float()
    means = mean_keys(k, chunk_size)[0].transpose(0, 1)
    keys = k[0].transpose(0, 1).unflatten(1, (n, chunk_size))
    centred = keys - means[:, :, None]
    covariance = centred.transpose(-1, -2) @ centred / chunk_size
    widest = torch.linalg.matrix_norm(torch.linalg.matrix_power(covariance, 4)) ** 0.25
    radius = centred.norm(dim=-1).amax((1, 2))
    longest = keys.norm(dim=-1).amax((1, 2))
    kept: dict[str, list[Tensor]] = {"mean": [], "max": [], "fp8": []}
    earlier = torch.arange(n, device=q.device) < torch.arange(T, device=q.device)[:, None] // chunk_size
    for start in range(0, T, BLOCK):
        b_q, seen = q[:, start : start + BLOCK], earlier[start : start + BLOCK]
        length = (scale * b_q.norm(dim=-1))[..., None]
        bound = (length * radius[:, None, None]).clamp_max(60.0)
        phi = torch.where(bound < 1e-2, 0.5 + bound / 6, (bound.expm1() - bound) / bound**2)
        low = (scale * b_q @ means.transpose(1, 2)).masked_fill(~seen, -torch.inf)
        high = low + length**2 * phi * widest[:, None]
        scores = scale * torch.einsum("htd,hncd->htnc", b_q, keys)
        top, mass = (t.masked_fill(~seen, -torch.inf) for t in (scores.amax(-1), scores.logsumexp(-1)))
        kept["mean"].append(seen & (high >= low.amax(-1, keepdim=True)))
        kept["max"].append(seen & (top + math.log(chunk_size) >= top.amax(-1, keepdim=True)))
        kept["fp8"].append(seen & (mass + 2 * length * longest[:, None, None] * FP8 >= mass.amax(-1, keepdim=True)))
    total = float(earlier.sum() * len(q))
    visits = float(sum(each.any(0).sum() for each in earlier.split(BLOCK)) * len(q))
    found: Row = {}
    for name, blocks in kept.items():
        found[name] = float(sum(each.sum() for each in blocks)) / total
        found[f"{name}_block"] = float(sum(each.any(1).sum() for each in blocks)) / visits
    return found


def rows(recorded: Path | None = None) -> Iterator[Row]:
    """Time selection and whole attention next to dense attention, forward and backward; add each sample's `shares`."""
    from seqarch.bench.timing import LONG, against, forward_backward, measure, race
    from seqarch.kernels import select_chunks, top1_chunk_attention

    dense: dict[torch.Size, list[Row]] = {}
    for name, sample, scale in samples(recorded, tuple((102400, *sizes) for sizes in LONG)):
        tensors = [t.cuda().requires_grad_() for t in sample]
        q, k = (t.detach() for t in tensors[:2])
        shape: Row = dict(zip("BTHD", q.shape, strict=True))
        name = f"{name}, scale {scale:.3g}"
        yield measure(f"{name}: select exact", partial(select_chunks, q, k, scale=scale), **shape)
        attend = forward_backward(top1_chunk_attention, tensors, scale=scale)
        if q.shape not in dense:  # its time depends on the shape only
            dense[q.shape] = list(race({}, tensors, **shape))
            yield from dense[q.shape]
        yield against(dense[q.shape], measure(f"{name}: exact fwd+bwd", attend, **shape))
        for bound, share in shares(q, k, scale, 128).items():
            yield {"name": f"{name}: {bound}", **shape, "p50": share, "unit": "share"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a model with attention layers, or its run folder")
    parser.add_argument("text", type=Path, help="a file of text that the model reads")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the text")
    options = vars(parser.parse_args())
    run(lambda: record(**options))


if __name__ == "__main__":
    main()
