"""Entropy of attention distributions."""
