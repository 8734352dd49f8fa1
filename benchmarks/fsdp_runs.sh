#!/usr/bin/env bash
# Trains recipes for a few steps on one and on two GPUs, for the table of docs/performance.md on several GPUs.
#     bash benchmarks/fsdp_runs.sh SHARDS OUT [RECIPE ...]     # SHARDS has the domain arxiv; the rows are in OUT/fsdp.csv
set -euo pipefail
usage="usage: fsdp_runs.sh SHARDS OUT [RECIPE ...]"
shards=${1:?$usage} out=${2:?$usage}
recipes=("${@:3}")
[ $# -gt 2 ] || recipes=(top1_chunk_1b mamba2_1b rwkv7_110m delta_net_110m)
train() {  # RECIPE NAME GPUS [OPTION ...]
  local steps=12 run=$out/${1//\//_}_$2
  [[ $1 != *_1b ]] || steps=7
  CUDA_VISIBLE_DEVICES=$3 OMP_NUM_THREADS=8 seqarch fit --config "recipes/$1.yaml" --data.root "$shards" --data.train '{"arxiv":1.0}' \
    --data.ood '[]' --data.eval_tokens 65536 --trainer.max_steps "$steps" --model.warmup_steps 5 --model.learning_rate 2e-4 \
    --throughput.every_n_steps 1 --train_loss.every_n_steps 1 --ood_loss.every_n_steps 0 --attention_entropy.every_n_steps 0 \
    --checkpoint.every_n_steps 0 --run_dir "$run" "${@:4}" > "$run.log" 2>&1 || { echo "$1 $2 failed: see $run.log"; return 1; }
}
mkdir -p "$out"
for ((i = 0; i < ${#recipes[@]}; i += 2)); do  # two at the same time, each on one GPU
  train "${recipes[i]}" one 0 --trainer.devices 1 & first=$!
  [ $((i + 1)) = ${#recipes[@]} ] || train "${recipes[i + 1]}" one 1 --trainer.devices 1 || { wait "$first"; exit 1; }
  wait "$first"
done
for recipe in "${recipes[@]}"; do
  train "$recipe" two 0,1 --trainer.devices 2 --trainer.strategy fsdp2
done
python "$(dirname "$0")/fsdp_steps.py" "$out" "$out/fsdp.csv"
