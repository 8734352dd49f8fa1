"""Short causal convolution: each channel mixes its last few tokens."""
