"""Sequence mixers from the literature as plug-ins of seqarch. Each module works independently of the others."""
