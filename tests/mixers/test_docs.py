"""The page on the attention family names every option there is, and its example of a test passes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from seqarch.mixers.attention import Attention, Top1Chunk, Top1Element
from seqarch.mixers.based import Based, GatedConvolution
from seqarch.mixers.delta_net import DeltaNet, GatedDeltaNet
from seqarch.mixers.rwkv7 import RWKV7, RWKV7Shell
from seqarch.mixers.rwkv56 import RWKV5, RWKV6
from seqarch.testing import MixerSuite

PAGE = (Path(__file__).parents[2] / "docs" / "mixers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "mixer",
    [
        Attention,
        Top1Element,
        Top1Chunk,
        RWKV7Shell,
        RWKV5,
        RWKV6,
        RWKV7,
        DeltaNet,
        GatedDeltaNet,
        Based,
        GatedConvolution,
    ],
)
def test_the_page_names_every_option(mixer: type) -> None:
    signature = inspect.signature(mixer).parameters.values()
    options = {parameter.name for parameter in signature if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    missing = options - set(re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE))
    assert options
    assert not missing


def test_the_page_names_every_attribute_of_the_suite() -> None:
    attributes = set(MixerSuite.__annotations__) - {"mixer", "options"}
    assert not {name for name in attributes if f"`{name}`" not in PAGE}


def test_the_example_is_a_test_that_passes() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict = {}
    exec(example, names)
    suite = names["TestMine"]()
    suite.test_causality(suite.options)
