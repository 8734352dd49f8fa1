"""seqarch: what a sequence mixer does to a language model's base capabilities."""

__version__ = "0.1.0"
