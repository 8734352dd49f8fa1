"""The state space dual of Mamba-2."""
