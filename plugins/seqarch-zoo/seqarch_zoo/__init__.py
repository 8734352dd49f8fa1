"""Sequence mixers from the literature as plug-ins of seqarch; each module stands by itself."""
