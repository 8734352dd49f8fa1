"""The delta rule and the gated delta rule."""
