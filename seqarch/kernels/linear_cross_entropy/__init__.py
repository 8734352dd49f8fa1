"""Cross-entropy of a linear layer without its logits."""
