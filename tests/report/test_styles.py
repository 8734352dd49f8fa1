"""Colours and markers of mixers: each has its own, the same in all figures, and readers tell them apart."""

from __future__ import annotations

from importlib.metadata import entry_points
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from seqarch.report.styles import LOOKS, styles


def test_a_mixer_looks_the_same_in_every_figure():
    everywhere = styles({"transformer_pp": "Attention", "mamba2": "Mamba2", "rwkv7": "RWKV7", "mine": "MyMixer"})
    for fewer in (("mine", "mamba2"), ("rwkv7", "transformer_pp"), ("mamba2", "mine", "rwkv7")):
        kinds = {"mamba2": "Mamba2", "rwkv7": "RWKV7", "transformer_pp": "Attention", "mine": "MyMixer"}
        assert styles({name: kinds[name] for name in fewer}) == {name: everywhere[name] for name in fewer}
    by_class = styles({name: name for name in ("Attention", "Mamba2", "RWKV7", "MyMixer")})
    assert list(by_class.values()) == list(everywhere.values()), "as the figure of a recall exam names them"
    assert styles({"tuned": "Mamba2"})["tuned"] == LOOKS["Mamba2"]


def test_every_built_in_mixer_has_a_look_of_its_own():
    assert {
        entry.name for entry in entry_points(group="seqarch.mixers") if entry.value.startswith("seqarch.")
    } <= LOOKS.keys()
    assert len({(look.colour, look.marker) for look in LOOKS.values()}) == len(LOOKS)
    assert len({look.colour for look in LOOKS.values()}) == len(LOOKS)


SEEN = {
    "all colours": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""What readers see of linear RGB: Machado, Oliveira and Fernandes 2009, at severity 1."""
XYZ = np.array([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]])
"""From linear RGB, as shares of white."""


def lab(colour: str, seen: Any) -> np.ndarray:
    """A colour in CIELAB, as a reader sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(np.asarray(seen) @ linear, 0, 1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("reader", SEEN)
def test_readers_tell_the_colours_of_the_library_apart(reader):
    colours = {name: lab(look.colour, SEEN[reader]) for name, look in LOOKS.items()}
    apart = {pair: np.linalg.norm(colours[pair[0]] - colours[pair[1]]) for pair in combinations(colours, 2)}
    assert min(apart.values()) > 5, min(apart, key=lambda pair: apart[pair])


@pytest.mark.parametrize("count", [5, 8, 20])
def test_models_that_the_table_does_not_know_differ(count):
    kinds = {f"temperature_{i}": "Attention" for i in range(count)}
    looks = styles(kinds)
    assert list(looks) == list(kinds)
    assert len({(look.marker, look.hollow) for look in looks.values()}) == count
    assert len({look.colour for look in looks.values()}) >= min(count, 8)
    assert styles(dict(reversed(kinds.items())))["temperature_3"] == looks["temperature_3"] or count > 5
