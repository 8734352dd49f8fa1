"""`seqarch exam` as users type it, in new processes: Ctrl-C, continuing, a verdict on another package's mixer.

`pytest -m slow tests/exam` runs the size `tiny` on its own data, in a third of its steps.
"""

import json
import os
import subprocess
import sys

import pytest

from seqarch.exam.pool import PATIENCE
from tests import processes
from tests.cli.test_plugin import ROOT, plugin  # noqa: F401  (a fixture)
from tests.conftest import flags
from tests.exam.conftest import SHRUNK

pytestmark = pytest.mark.commands


def exam(shards, out, site, **env):
    options = {**SHRUNK, "trainer.max_steps": 20, "trainer.callbacks": "[tests.exam.ctrl_c.CtrlC]"}
    args = ["--mixer", "RunningMean", "--mixer.gain", "0.5", "--seeds", "1", "--data", shards, "--out", out]
    args += ["--allow_code", "tests", "--workers", "1"]
    env = {
        "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT))),
        "OMP_NUM_THREADS": "1",
        "SEQARCH_CACHE": str(out / "cache"),
        **env,
    }
    # Ctrl-C must not wait for as long as it would for a run that does not stop.
    return processes.seqarch([*map(str, ("exam", *args)), *flags(**options)], out / "logs", env, timeout=PATIENCE)


def test_exam_goes_on_after_ctrl_c_to_a_verdict(shards, tmp_path, plugin):  # noqa: F811
    stopped = exam(shards, tmp_path, plugin, CTRL_C_STEP="12")
    assert stopped.returncode == 130, stopped.stderr
    assert "stopped; the same command resumes from the last checkpoint" in stopped.stdout
    reference, candidate = (tmp_path / "tiny" / name for name in ("transformer_pp", "RunningMean-gain=0.5"))
    assert json.loads((reference / "seed_0/run.json").read_text())["status"] == "stopped"
    assert not (candidate / "seed_0").exists()

    done = exam(shards, tmp_path, plugin)
    assert done.returncode == 0, done.stderr
    assert "steps 13 to 20" in done.stdout or "steps 12 to 20" in done.stdout
    assert "# RunningMean-gain=0.5 against transformer_pp (tiny)" in done.stdout
    verdict = json.loads((candidate / "verdict.json").read_text())
    assert verdict["missing"] == []
    assert list(verdict["finished"]["budgets"][-1]["domains"]) == ["code"]
    assert (candidate / "scatter.png").is_file()
    assert (candidate / "verdict.md").read_text().rstrip("\n") in done.stdout


@pytest.mark.slow
def test_the_size_tiny_on_the_embedded_corpus(tmp_path):
    args = ["--mixer", "Top1Chunk", "--size", "tiny", "--seeds", "1", "--out", str(tmp_path / "out")]
    args += ["--trainer.max_steps", "160"]  # of 480, which take ten minutes on busy cores
    env = {**os.environ, "SEQARCH_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "seqarch", "exam", *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    verdict = json.loads((tmp_path / "out/tiny/Top1Chunk/verdict.json").read_text())
    assert verdict["missing"] == []
    assert verdict["data"]["tokens"] == 160 * 8 * 256
    assert verdict["parameters"] == {"candidate": 230016, "reference": 230016, "ratio": 1.0}
    assert [each["tokens"] for each in verdict["finished"]["budgets"]][-1] == 160 * 8 * 256
    assert list(verdict["finished"]["weights"]) == ["cloud", "cpp", "names", "python"]
    assert all(final["in_domain"] < 2.7 for final in verdict["final"].values())  # over 3 with only unigrams
    assert len(verdict["convergence"]) == 4
    assert (tmp_path / "out/tiny/Top1Chunk/entropy.csv").read_text().count("\n") > 4
