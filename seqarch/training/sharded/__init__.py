"""Checkpoints as folders: each process writes its own part of the tensors, and any number of processes reads them."""
