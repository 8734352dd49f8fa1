"""The core that docs/architecture.md names stays small, and a forward pass passes the files that it names."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import seqarch
from seqarch.mixers.attention import Top1Chunk
from seqarch.model import SequenceLM
from seqarch.model.feed_forward import SwiGLU
from seqarch.report.gap import FinishedModels
from seqarch.report.runs import Evaluations

PACKAGE = Path(seqarch.__file__).parent
PAGE = PACKAGE.parent / "docs/architecture.md"
FILES, LINES, FORWARD, GAP = 16, 3_600, 11, 8
"""The most files and lines of the core, and files of a forward pass of Top-1 chunk attention on a CPU and of a gap."""


def named(heading: str) -> list[str]:
    """The files of the package that a section of the page names, in order."""
    if not PAGE.is_file():
        pytest.skip("the pages are not part of an installed package")
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"`([a-z_/0-9]+\.py)`", section)


def passed(run) -> list[str]:
    """The files of the package whose functions a call runs, in the order of their first function."""
    files: dict[str, None] = {}

    def note(frame, event, _) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files[path.relative_to(PACKAGE).as_posix()] = None

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(files)


def test_the_core_is_small():
    core = named("The core, in reading order")
    assert 10 <= len(core) == len({*core}) <= FILES
    assert sum(len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in core) <= LINES


def test_a_forward_pass_runs_in_few_files():
    def top1(*place: int) -> Top1Chunk:
        return Top1Chunk(*place, n_heads=4, chunk_size=8)

    lm = SequenceLM(256, 32, 1, {"top1": top1}, feed_forward=SwiGLU)
    tokens = torch.randint(0, 256, (2, 40))
    files = passed(lambda: lm(tokens))
    assert len(files) <= FORWARD
    assert {*named("One forward pass")} == {*files}


def test_a_gap_is_computed_in_few_files():
    def models(shift: float) -> Evaluations:
        losses = np.array([4.0, 3.8, 3.6])
        return Evaluations(np.array([10e6, 20e6, 40e6]), losses, {"code": 2 * losses + shift, "law": losses})

    seeds = [{seed: models(shift + 0.01 * seed) for seed in range(2)} for shift in (0.1, 0.0)]
    files = passed(lambda: FinishedModels({"candidate": seeds[0]}, seeds[1]).gaps()["candidate"].sentence("a", "b"))
    assert len(files) <= GAP
    assert "report/estimates.py" in files  # it was traced to its sentence
