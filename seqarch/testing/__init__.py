"""The test of the mixer contract: what any mixer, built in or from a plug-in, inherits.

from seqarch.testing import MixerSuite

class TestMyMixer(MixerSuite):
    mixer = MyMixer
    options = {"n_heads": 4}
"""

from seqarch.testing.suite import MixerSuite

__all__ = ["MixerSuite"]
