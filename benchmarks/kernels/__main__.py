"""Every timing of docs/kernels.md, on a GPU: the steps of `seqarch bench kernels`, and more that only our pages need.

python -m benchmarks.kernels limits time skew remote trained growth --csv kernels.csv
"""

import argparse
import dataclasses
from pathlib import Path

from benchmarks.script import run
from seqarch.bench import kernels
from seqarch.bench.kernels import Step

STEPS = {
    **kernels.STEPS,
    "skew": Step("benchmarks.kernels.top1:skew", "Top-1 chunk attention with 90 % of the queries on one chunk"),
    "remote": Step("benchmarks.kernels.top1:remote", "up to eight remote chunks per query, 102,400 tokens"),
    "trained": Step("benchmarks.kernels.trained:rows", "exact selection on random and recorded vectors"),
    "growth": Step("benchmarks.kernels.top1:growth", "1,048,576 tokens"),
    "decode": Step("benchmarks.kernels.decode:rows", "one new token against cached keys"),
    "loss": Step("benchmarks.kernels.loss:rows", "linear cross-entropy next to a loss with all logits"),
    "vocabularies": Step("benchmarks.kernels.loss:vocabularies", "the same with 32,000 and 131,072 entries"),
    "scan": Step("benchmarks.kernels.scan:rows", "the selective scan of Mamba-1, next to mamba-ssm's CUDA kernel"),
    "ssd": Step("benchmarks.kernels.scan:of_heads", "the recurrence of Mamba-2 by each backend"),
    "errors": Step("benchmarks.kernels.scan:errors", "both next to float64, outputs and gradients"),
    "around": Step("benchmarks.kernels.around:rows", "short convolutions and Mamba-2's gated norm, next to others"),
    "cold": Step("benchmarks.kernels.cold:rows", "first calls in new processes with empty compile caches"),
    "moba": Step("benchmarks.kernels.moba:rows", "MoBA's published code, which must be installed"),
    "documents": Step("benchmarks.kernels.documents:rows", "softmax attention to packed documents, by each kernel"),
    "dense": Step("benchmarks.kernels.dense:rows", "softmax attention by each kernel, 512 to 32,768 tokens"),
    "profile": Step("benchmarks.kernels.top1:profile", "where the time goes, by CUDA kernel"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = "; ".join(f"{name}: {step.help}" for name, step in STEPS.items())
    parser.add_argument("steps", nargs="+", metavar="STEP", help=steps.replace("%", "%%"))
    parser.add_argument("--recorded", type=Path, help="vectors for trained, from benchmarks.kernels.trained")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    trained = dataclasses.replace(STEPS["trained"], options={"recorded": options.recorded})
    run(lambda: kernels.bench_kernels(options.steps, options.csv, {**STEPS, "trained": trained}))


if __name__ == "__main__":
    main()
