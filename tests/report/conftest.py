from pathlib import Path

import pytest

from seqarch.report import Findings
from seqarch.runs.folder import branch_path
from tests.report.runs_for_tests import write_capable, write_run

MANY = {
    "rwkv5": ("RWKV5", 0.12),
    "top1_chunk": ("Top1Chunk", -0.03),
    "mamba1": ("Mamba1", 0.06),
    "transformer_pp": ("Attention", 0.0),
    "mamba2": ("Mamba2", 0.09),
    "window_64": ("Attention", 0.03),
    "rwkv7": ("RWKV7", 0.075),
    "hybrid_gated_delta_net_attention_of_one_layer": ("GatedDeltaNet", 0.015),
    "slow": ("Based", 0.0),
}
"""Class of the mixer and gap."""


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Run folders of a reference and of two models, of which one has a hostile name and one no entropies."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        write_run(folder / "pp", "transformer_pp"),
        write_run(folder / "top1", "_top1_$chunk$<b>", gap=0.05, speed=0.9),
        write_run(folder / "mamba", "mamba2", gap=0.1, layers=0),
    ]


@pytest.fixture(scope="package")
def found(runs: list[Path]) -> Findings:
    return Findings.read(runs)


@pytest.fixture(scope="package")
def many(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    folder = tmp_path_factory.mktemp("many")
    runs: list[Path] = []
    for name, (kind, gap) in MANY.items():
        options = {"gap": gap, "speed": 0.01 if name == "slow" else 1.0, "facts": {"mixers": {"mixer": kind}}}
        runs += [write_run(folder / f"{name}_{s}", name, seed=s, **options) for s in range(1 + (name == "mamba2"))]
    return Findings.read(runs, "transformer_pp")


@pytest.fixture(scope="package")
def capable(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    gaps = {"transformer_pp": 0.0, "a_mixer_from_another_package_with_a_long_name": 0.1}
    return write_capable(tmp_path_factory.mktemp("capable"), gaps)


@pytest.fixture(scope="package")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Two models, and one whose run was stopped early but has a longer finished model."""
    folder = tmp_path_factory.mktemp("stopped")
    runs = [write_run(folder / name, name, gap=gap) for name, gap in (("transformer_pp", 0.0), ("mamba2", 0.1))]
    runs.append(write_run(folder / "rwkv7", "rwkv7", gap=-0.5, steps=80, facts={"status": "stopped"}))
    for run in runs:
        for steps in (8, 400):
            write_run(branch_path(run, steps), run.name, gap=-0.5 * (run.name == "rwkv7"), steps=steps, every=4)
    return Findings.read(runs)


@pytest.fixture
def unpainted(monkeypatch):
    """Make the pictures of a report empty files: drawing them takes most of its time."""

    def write(figure, stem):
        written = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
        for path in written:
            path.touch()
        return written

    monkeypatch.setattr("seqarch.report.panels.write", write)


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the figures out of reports, for tests of their words and numbers."""
    monkeypatch.setattr("seqarch.report.Comparison.figures", lambda *_: {})
