"""RWKV-5 and RWKV-6 keep the contract, follow the published formulas and start from the published values."""

from __future__ import annotations

from typing import ClassVar

from seqarch.mixers.rwkv56 import RWKV5, RWKV6
from seqarch.testing import MixerSuite


class TestRWKV5(MixerSuite):
    mixer = RWKV5
    options: ClassVar = {"n_heads": 4}


class TestRWKV6(MixerSuite):
    mixer = RWKV6
    options: ClassVar = [{"n_heads": 4}, {"n_heads": 2, "mix_rank": 3, "decay_rank": 5}]
