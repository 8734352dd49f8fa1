"""Top-1 element attention."""
