"""The page on mixers names every option, and its example of a test passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seqarch.cli.mixers import mixer_options
from seqarch.mixers.registry import load_mixer, mixer_entries
from seqarch.testing import MixerSuite

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mixers.md").read_text(encoding="utf-8")


OURS = [entry.name for entry in mixer_entries() if entry.package == "seqarch"]


@pytest.mark.parametrize("name", OURS)
def test_the_page_names_every_option(name: str) -> None:
    options = set(mixer_options(load_mixer(name)))
    missing = options - set(re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE))
    assert options
    assert not missing


def test_each_of_ours_declares_what_tables_and_figures_show() -> None:
    for name in OURS:
        mixer = load_mixer(name)
        assert mixer.family
        assert mixer.source
        assert mixer.kernels.keys() == {"cpu", "cuda"}
        options = mixer_options(mixer)
        assert {option.partition(".")[0] for option in mixer.scales} <= options.keys(), name
        assert {option for at in mixer.published.values() for option in at} <= options.keys(), name


def test_the_page_names_every_attribute_of_the_suite() -> None:
    attributes = set(MixerSuite.__annotations__) - {"mixer", "options"}
    assert not {name for name in attributes if f"`{name}`" not in PAGE}


def test_the_example_is_a_test_that_passes() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict = {}
    exec(example, names)
    suite = names["TestMine"]()
    suite.test_causality(suite.options)
