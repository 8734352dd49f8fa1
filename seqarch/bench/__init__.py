"""Side-by-side timings: `seqarch bench kernels` for the ops, `seqarch bench mixers` for whole training steps."""
