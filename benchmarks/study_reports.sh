#!/usr/bin/env bash
# Every figure and CSV of the drafts in docs/results but copying.csv, from the run folders that the commands of docs/results/README.md make:
#     bash benchmarks/study_reports.sh [RUNS]      RUNS: the folder of exam/, exam_mixed/, exam_lr_low/ ...; default: runs
set -euo pipefail
runs=$(realpath "${1:-runs}")
results=$(realpath "$(dirname "$0")/../docs/results")
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT

# make NAME REFERENCE "FIGURES" FOLDER "MODELS" [OPTION ...]: all seeds of the models, the figures that are kept
make() {
    local name=$1 reference=$2 figures=$3 folder=$4 models=$5 paths=() out=$scratch/$1
    shift 5
    for model in $models; do paths+=("$runs/$folder/$model"/seed_*); done
    echo "== $name"
    seqarch report "${paths[@]}" --reference "$reference" --out "$out" "$@" | sed '/^wrote/d'
    mkdir -p "$results/$name"
    cp "$out"/*.csv "$results/$name"
    for figure in $figures; do cp "$out/$figure.png" "$results/$name"; done
}

small=exam/draft
make figure_1b transformer_pp "scatter gap" $small \
    "transformer transformer_pp window_64 based mamba1 mamba2 rwkv5 rwkv6 rwkv7 delta_net gated_delta_net top1_element top1_chunk top1_chunk_approx"
make reasons transformer_pp "scatter entropy" $small "transformer_pp transformer rwkv7 rwkv7_shell_softmax_100k"
make reasons/against_rwkv7 rwkv7 "" $small "rwkv7 rwkv7_shell_softmax_100k"
make windows transformer_pp "scatter" $small "transformer_pp window_256 window_64 window_16"
make positions transformer_pp "scatter gap" $small "transformer_pp position_none position_absolute position_alibi transformer"
make positions/against_transformer transformer "" $small "transformer position_absolute"
make relation transformer_pp "scatter" $small "transformer_pp constant_keys constant_queries_keys"
make temperature transformer_pp "scatter entropy" $small \
    "transformer_pp temperature_0.0625 qk_norm temperature_0.25 temperature_0.5 temperature_1.0"
make hybrids transformer_pp "scatter" $small \
    "transformer_pp mamba2 hybrid_mamba2_attention hybrid_mamba2_top1_chunk gated_delta_net hybrid_gated_delta_net_attention hybrid_gated_delta_net_top1_chunk"
make hybrids/against_mamba2 mamba2 "" $small "mamba2 hybrid_mamba2_attention hybrid_mamba2_top1_chunk"
make hybrids/against_gated_delta_net gated_delta_net "" $small \
    "gated_delta_net hybrid_gated_delta_net_attention hybrid_gated_delta_net_top1_chunk"
make chunk_size transformer_pp "gap" $small \
    "transformer_pp top1_chunk_16 top1_chunk_32 top1_chunk top1_chunk_128 top1_chunk_2_remote top1_chunk_4_remote"
make mamba1 mamba1 "" $small "mamba1 mamba1_decay_one mamba1_decay_none mamba1_decay_none_no_conv"
make mamba2 mamba2 "" $small "mamba2 mamba2_decay_one mamba2_decay_none mamba2_decay_none_no_conv mamba2_no_norm"
make learning_rate/1.0e-3 transformer_pp "" exam_lr_low/small "transformer_pp top1_chunk mamba2"
make learning_rate/2.2e-3 transformer_pp "" exam_lr_high/small "transformer_pp top1_chunk mamba2"
make medium transformer_pp "scatter" exam_medium/medium "transformer_pp transformer top1_chunk rwkv7 mamba2"
make figure_1a transformer_pp "scatter gap" exam_mixed/small "transformer_pp window_64 mamba2 rwkv7 top1_chunk"
make figure_1a/unseen transformer_pp "" exam_mixed/small "transformer_pp window_64 mamba2 rwkv7 top1_chunk" \
    --domains arxiv github stack

python - "$runs" "$results/runs.csv" <<'PYTHON'
"""What each run took, one row a run."""
import csv, sys
from pathlib import Path
from seqarch.report import load_groups
from seqarch.report.costs import costs

runs, out = map(Path, sys.argv[1:])
with out.open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(("run", "status", "steps", "parameters", "tokens_per_second", "mfu", "peak_gib", "minutes", "hardware", "commit", "versions"))
    for folder in sorted(runs.glob("exam*/*/*/seed_*")):
        (group,) = load_groups([folder], ())
        (run,), cost = group.runs, costs(group)
        facts = (run.facts["status"], run.steps, run.facts["parameters"])
        measured = (cost.tokens_per_second, cost.mfu, cost.peak_gib, cost.minutes_a_run)
        rounded = ("" if value is None else round(value, 3) for value in measured)
        table.writerow((folder.relative_to(runs), *facts, *rounded, cost.hardware, *cost.commits[:1], cost.versions))
PYTHON
