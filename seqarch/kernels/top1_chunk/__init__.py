"""Top-1 chunk selection, attention and decoding."""
