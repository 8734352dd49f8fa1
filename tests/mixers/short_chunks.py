"""The suite for a mixer whose reference computes chunk by chunk."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import pytest

from seqarch.testing import MixerSuite

TRACED: dict[str, Any] = {"backend": "eager", "fullgraph": True}
"""Options of `torch.compile` for a mixer of PyTorch's own operators whose recurrence, or whose op, a test of another
mixer or of ops compiles with AOTAutograd: that takes three quarters of the time."""


class ShortChunks(MixerSuite):
    """Makes the chunks so short that the suite's sequences cover more than two."""

    reference: ClassVar[ModuleType]
    """The module that computes the chunks."""
    constant: ClassVar[str] = "CHUNK_SIZE"
    """The module's name for the length of a chunk."""
    length: ClassVar[int] = 16

    @pytest.fixture(autouse=True)
    def shorten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.reference, self.constant, self.length)
