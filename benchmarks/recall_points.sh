#!/usr/bin/env bash
# Recall against state size (MQAR, `seqarch recall mqar --size small`): a point per line below, the most telling first.
#     PROCESSES=10 bash benchmarks/recall_points.sh OUT [SETTING ...]     # such as --epochs=8 for a first look
# Ten points at once share a GPU well. Started again, it keeps finished points and goes on with the others.
set -euo pipefail
export OUT=${1:?usage: recall_points.sh OUT [SETTING ...]} SETTINGS="${*:2}" OMP_NUM_THREADS=1
point() {  # WIDTH MIXER [OPTION ...]
  local width=$1 mixer=$2 log; shift 2
  log="$OUT/$mixer-$width${*//--mixer/}.log" && log=${log// /}
  # shellcheck disable=SC2086
  seqarch recall mqar --size small --out "$OUT" --mixer "$mixer" "$@" --widths="[$width]" $SETTINGS \
    > "$log" 2>&1 || echo "$mixer at width $width: $(tail -1 "$log")"
}
export -f point
mkdir -p "$OUT"
xargs -P "${PROCESSES:-10}" -L 1 bash -c 'point "$@"' _ <<'LIST'
64 DeltaNet --mixer.n_heads=2
64 Attention --mixer.n_heads=2
128 Mamba2 --mixer.d_state=16
64 RWKV7 --mixer.n_heads=1
64 GatedDeltaNet --mixer.n_heads=2 --mixer.head_dim=32 --mixer.expand_v=2.0 --mixer.gate=false
64 TaylorLinearAttention --mixer.n_heads=1 --mixer.feature_dim=16
128 Attention --mixer.n_heads=1 --mixer.window=64
64 Top1Chunk --mixer.n_heads=2 --mixer.chunk_size=16
64 Top1Element --mixer.n_heads=2
64 RWKV6 --mixer.n_heads=1
64 RWKV5 --mixer.n_heads=1
64 Mamba2 --mixer.d_state=16
128 Mamba1 --mixer.d_state=24
128 DeltaNet --mixer.n_heads=2
128 RWKV7 --mixer.n_heads=2
128 GatedDeltaNet --mixer.n_heads=2 --mixer.head_dim=64 --mixer.gate=false
128 TaylorLinearAttention --mixer.n_heads=1 --mixer.feature_dim=16
128 Attention --mixer.n_heads=1 --mixer.window=256
64 Mamba1 --mixer.d_state=16
128 Top1Chunk --mixer.n_heads=2 --mixer.chunk_size=16
128 Top1Element --mixer.n_heads=2
128 RWKV6 --mixer.n_heads=2
128 RWKV5 --mixer.n_heads=2
128 Attention --mixer.n_heads=2
256 Mamba2 --mixer.d_state=16
256 DeltaNet --mixer.n_heads=2
LIST
cat "$OUT/recall/small/mqar.csv"
