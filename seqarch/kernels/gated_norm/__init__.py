"""Mamba-2's gated RMSNorm."""
