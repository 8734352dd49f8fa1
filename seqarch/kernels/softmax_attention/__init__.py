"""Causal softmax attention."""
