#!/usr/bin/env bash
# Trains four recipes for a few steps on one and on two GPUs, then prints the table of docs/performance.md, "Several GPUs".
#     bash benchmarks/fsdp_runs.sh SHARDS OUT     # SHARDS has the domain arxiv; the rows are in OUT/fsdp.csv
set -euo pipefail
shards=${1:?usage: fsdp_runs.sh SHARDS OUT} out=${2:?usage: fsdp_runs.sh SHARDS OUT}
train() {  # RECIPE STEPS NAME GPUS [OPTION ...]
  CUDA_VISIBLE_DEVICES=$4 OMP_NUM_THREADS=8 seqarch fit --config "recipes/$1.yaml" --data.root "$shards" --data.train '{"arxiv":1.0}' \
    --data.ood '[]' --data.eval_tokens 65536 --trainer.max_steps "$2" --model.warmup_steps 5 --model.learning_rate 2e-4 \
    --throughput.every_n_steps 1 --train_loss.every_n_steps 1 --ood_loss.every_n_steps 0 --attention_entropy.every_n_steps 0 \
    --checkpoint.every_n_steps 0 --run_dir "$out/$1_$3" "${@:5}" > "$out/$1_$3.log" 2>&1 || { echo "$1 $3 failed: see $out/$1_$3.log"; return 1; }
}
pair() {  # RECIPE RECIPE STEPS: each on one GPU, at the same time
  train "$1" "$3" one 0 --trainer.devices 1 & local first=$!
  train "$2" "$3" one 1 --trainer.devices 1 && wait "$first"
}
mkdir -p "$out"
pair top1_chunk_1b mamba2_1b 7
pair rwkv7_110m delta_net_110m 12
while read -r recipe steps; do
  train "$recipe" "$steps" two 0,1 --trainer.devices 2 --trainer.strategy fsdp2 < /dev/null
done <<'LIST'
top1_chunk_1b 7
mamba2_1b 7
rwkv7_110m 12
delta_net_110m 12
LIST
python "$(dirname "$0")/fsdp_table.py" "$out" --csv "$out/fsdp.csv"
