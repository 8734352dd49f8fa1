"""`seqarch exam` as it is typed, in processes of its own: Ctrl-C, going on, a verdict on another package's mixer."""

import functools
import json
import os
import signal
import subprocess
import sys

from seqarch.exam.worker import PATIENCE
from tests.cli.test_plugin import ROOT, plugin  # noqa: F401  (a fixture)
from tests.conftest import flags
from tests.exam.conftest import SHRUNK


def exam(shards, out, site, **env):
    options = {**SHRUNK, "trainer.callbacks": "[tests.exam.ctrl_c.CtrlC]"}
    args = ["--mixer", "RunningMean", "--mixer.gain", "0.5", "--seeds", "1", "--data", shards, "--out", out]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT))),
        "OMP_NUM_THREADS": "1",
        "SEQARCH_CACHE": str(out / "cache"),
        **env,
    }
    command = [sys.executable, "-m", "seqarch", "exam", *map(str, args), *flags(**options)]
    return subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
        timeout=PATIENCE,  # Ctrl-C must not wait for as long as it would for a run that does not stop
    )


def test_exam_goes_on_after_ctrl_c_to_a_verdict(shards, tmp_path, plugin):  # noqa: F811
    stopped = exam(shards, tmp_path, plugin, CTRL_C_STEP="12")
    assert stopped.returncode == 130, stopped.stderr
    assert "stopped; the same command goes on from the last checkpoint" in stopped.stdout
    reference, candidate = (tmp_path / "tiny" / name for name in ("transformer_pp", "RunningMean-gain=0.5"))
    assert json.loads((reference / "seed_0/run.json").read_text())["status"] == "stopped"
    assert not (candidate / "seed_0").exists()

    done = exam(shards, tmp_path, plugin)
    assert done.returncode == 0, done.stderr
    assert "steps 13 to 20" in done.stdout or "steps 12 to 20" in done.stdout
    assert "# RunningMean-gain=0.5 against transformer_pp (tiny)" in done.stdout
    verdict = json.loads((candidate / "verdict.json").read_text())
    assert verdict["missing"] == []
    assert [gap["domain"] for gap in verdict["gaps"]] == ["code"]
    assert verdict["gaps"][0]["low"] < verdict["gaps"][0]["value"] < verdict["gaps"][0]["high"]
    assert verdict["gaps"][0]["documents"] > 5
    assert (candidate / "scatter.png").is_file()
    assert (candidate / "verdict.md").read_text().rstrip("\n") in done.stdout
