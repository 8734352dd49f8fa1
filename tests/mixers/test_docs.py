"""The page on mixers names every option there is, gives the costs as printed, and its example of a test passes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from seqarch.cli.mixer_costs import cost_table
from seqarch.mixers.attention import Attention, Top1Chunk, Top1Element
from seqarch.mixers.based import Based, GatedConvolution
from seqarch.mixers.delta_net import DeltaNet, GatedDeltaNet
from seqarch.mixers.mamba1 import Mamba1
from seqarch.mixers.mamba2 import Mamba2
from seqarch.mixers.registry import mixer_entries
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
        Mamba1,
        Mamba2,
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


def rows(text: str) -> list[list[str]]:
    """The cells of the lines of a Markdown table, but for its rule."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|") and "--" not in line]
    return [[cell.strip(" `") for cell in line] for line in lines]


def test_the_costs_are_those_that_are_printed() -> None:
    ours = {"mixer", *(entry.name for entry in mixer_entries() if entry.package == "seqarch")}
    printed = [row for row in rows(cost_table()) if row[0] in ours]
    section = PAGE.partition("\n## Costs\n")[2].partition("\n## ")[0]
    assert rows(re.sub(r"\[(.+?)\]\(.+?\)", r"\1", section)) == printed  # the page has links
    assert not any("-" in row for row in printed)  # each of ours says what it is made for and where it is from


def test_the_page_names_every_attribute_of_the_suite() -> None:
    attributes = set(MixerSuite.__annotations__) - {"mixer", "options"}
    assert not {name for name in attributes if f"`{name}`" not in PAGE}


def test_the_example_is_a_test_that_passes() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict = {}
    exec(example, names)
    suite = names["TestMine"]()
    suite.test_causality(suite.options)
