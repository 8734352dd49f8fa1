"""The delta rule and the gated delta rule."""

from seqarch.kernels.delta_rule.op import delta_rule

__all__ = ["delta_rule"]
