"""GatedAttention keeps the contract around cores of seqarch, and equals gated softmax attention."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from seqarch_zoo.gated_attention import GatedAttention

from seqarch.mixers.cores import Top1ChunkCore
from seqarch.testing import MixerSuite


class TestGatedAttention(MixerSuite):
    mixer = GatedAttention
    options: ClassVar = [{"n_heads": 4, "position": "alibi"}, {"n_heads": 4, "key_conv": 3}]


class TestAroundTop1Chunk(MixerSuite):
    mixer = GatedAttention
    options: ClassVar = [{"n_heads": 4, "core": Top1ChunkCore(8)}]
    differentiable = False  # the selection jumps


def test_equals_gated_softmax_attention():
    """arXiv 2505.06708, equation 5 with the gate G1."""
    torch.manual_seed(0)
    mixer, x = GatedAttention(16, 0, 2, n_heads=2, position="none").double(), torch.randn(2, 9, 16).double()
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in mixer.qkv(x).chunk(3, dim=-1))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixer(x), mixer.out(o * torch.sigmoid(mixer.gate(x))), rtol=1e-10, atol=1e-12)
