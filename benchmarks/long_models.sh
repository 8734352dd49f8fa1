#!/usr/bin/env bash
# Trains models of 102,400 tokens for a short time, and scores each on long documents and passkeys while the next one trains.
#     bash benchmarks/long_models.sh SHARDS OUT 0,1 rwkv7_shell_softmax_100k rwkv7_shell_top1_chunk_approx_100k    # on GPUs 0 and 1
#     seqarch report OUT/*_100k --reference rwkv7_shell_softmax_100k --out OUT/report    # figures, and the scores in capabilities.csv
# SHARDS has the domain web, and arxiv and github of documents with at least 102,400 tokens (`seqarch data prepare --min_tokens`).
# FIT, LONG and PASSKEY hold further options of `fit` and of the two calls of `eval`.
set -euo pipefail
usage="usage: long_models.sh SHARDS OUT GPUS MODEL ..."
shards=${1:?$usage} out=${2:?$usage} gpus=${3:?$usage}
: "${4:?$usage}"
mkdir -p "$out"
commas=${gpus//[!,]/}
devices=(--trainer.devices $((${#commas} + 1)))
[ -z "$commas" ] || devices+=(--trainer.strategy fsdp2)
scoring=()

score() {  # MODEL GPU TASK [OPTION ...]
  CUDA_VISIBLE_DEVICES=$2 seqarch eval --checkpoint "$out/$1" --tasks "$3" "${@:4}" > "$out/$1.$3.log" 2>&1 ||
    { echo "$1 has no score of $3: see $out/$1.$3.log"; return 1; }
}

failed=0
for model in "${@:4}"; do
  # shellcheck disable=SC2086  # options are words
  CUDA_VISIBLE_DEVICES=$gpus seqarch fit --config "$model" --config base/long --data.root "$shards" --run_dir "$out/$model" \
    "${devices[@]}" ${FIT:-} > "$out/$model.log" 2>&1 || { echo "$model failed: see $out/$model.log"; failed=1; continue; }
  # shellcheck disable=SC2086
  { score "$model" "${gpus%%,*}" long --limit 30 ${LONG:-} & scoring+=($!)
    score "$model" "${gpus##*,}" passkey --limit 12 ${PASSKEY:-} & scoring+=($!); }
done
for each in "${scoring[@]}"; do wait "$each" || failed=1; done
exit $failed
