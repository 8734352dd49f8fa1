"""GatedAssociative keeps the contract and equals the formulas of the paper."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from seqarch_zoo.gated_associative import GatedAssociative

from seqarch.testing import MixerSuite


class TestGatedAssociative(MixerSuite):
    mixer = GatedAssociative
    options: ClassVar = [{"n_slots": 24}, {"n_slots": 8, "conv_size": 4}]


def test_formulas_of_the_paper():
    """Sections 3.2 to 3.4, with PyTorch's own convolution."""
    torch.manual_seed(0)
    mixer = GatedAssociative(16, 0, 2, n_slots=12).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    convolution = mixer.convolution
    assert convolution.bias is not None
    padded = F.pad(x.mT, (2, 0))
    local = F.conv1d(padded, convolution.weight[:, None], convolution.bias, groups=16).mT
    weights = (x @ mixer.memory.T).exp()
    found = (weights / weights.sum(dim=-1, keepdim=True)) @ mixer.memory
    local_gate, found_gate = torch.sigmoid(mixer.gate(x)).chunk(2, dim=-1)
    torch.testing.assert_close(mixer(x), local_gate * local + found_gate * found, rtol=1e-12, atol=1e-12)
