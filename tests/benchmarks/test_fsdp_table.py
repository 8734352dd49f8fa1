"""One command times one and two GPUs, and pages have the speed-up of its rows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fsdp_table import FIRST, table
from seqarch.tables import read_csv

ROOT = Path(__file__).parents[2]
SEQARCH = """#!/usr/bin/env bash
while [ $# -gt 0 ]; do
  case $1 in
    --run_dir) run=$2 ;; --trainer.max_steps) steps=$2 ;;
    --trainer.devices) devices=$2 ;; --trainer.strategy) strategy=$2 ;;
  esac
  shift
done
mkdir -p "$run"
{
  echo step,loss/train,throughput/tokens_per_second,memory/peak_gib
  for step in $(seq "$steps"); do echo "$step,$step.$devices,$(( devices * (step > 2 ? 1000 : 10) )),$devices.5"; done
} > "$run/curves.csv"
[ "$devices $strategy $CUDA_VISIBLE_DEVICES" = "2 fsdp2 0,1" ] || [ "$devices$strategy" = 1 ]
"""


def test_the_pages_have_the_speed_up_of_two_gpus():
    cells = table(read_csv(ROOT / "benchmarks/fsdp_h200.csv"))
    speed_ups = [float(each[3]) for each in cells]
    assert len(speed_ups) == 4
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"{min(speed_ups):.2f} to {max(speed_ups):.2f} times as fast" in changes
    rate, memory = next((each[2], each[4].split(" and ")[1]) for each in cells if "top1_chunk_1b" in each[0])
    cluster = " ".join((ROOT / "docs/cluster.md").read_text(encoding="utf-8").split())
    assert f"reached {rate} tokens per second with {memory} per GPU" in cluster


def test_a_step_that_compiles_does_not_count():
    def row(gpus: int, step: int, rate: float) -> dict[str, str]:
        return {
            "recipe": "r",
            "gpus": str(gpus),
            "step": str(step),
            "loss": str(step + gpus / 4),
            "tokens_per_s": str(rate),
            "peak_gib": "1",
        }

    rates = [1.0] * (FIRST - 1) + [5000.0, 7000.0, 6000.0]
    rows = [row(gpus, step, gpus * rate) for gpus in (1, 2) for step, rate in enumerate(rates, 1)]
    assert table(rows) == [["`r`", "6,000", "12,000", "2.00", "1.0 and 1.0 GiB", "0.2500"]]


def train(folder: Path, seqarch: str, *named: str) -> tuple[int, list[str]]:
    """The status and the lines of the command, with a script in place of `seqarch`."""
    program = folder / "bin/seqarch"
    program.parent.mkdir()
    program.write_text(seqarch)
    program.chmod(0o755)
    (folder / "bin/python").symlink_to(sys.executable)
    paths = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / "said").open("w") as said:  # a pipe would wait for the processes that the command leaves
        done = subprocess.run(
            ["bash", "benchmarks/fsdp_runs.sh", "shards", str(folder / "out"), *named],
            cwd=ROOT, env={**os.environ, **paths}, stdout=said, stderr=subprocess.STDOUT, timeout=60,
        )  # fmt: skip
    return done.returncode, (folder / "said").read_text().splitlines()


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
def test_the_command_fails_once_no_run_is_left(tmp_path: Path):
    slow = f'#!/usr/bin/env bash\n[ "$CUDA_VISIBLE_DEVICES" = 0 ] || exit 3\nsleep 0.5\ntouch {tmp_path}/ended\n'
    assert train(tmp_path, slow, "a", "b") == (1, [f"b one failed: see {tmp_path}/out/b_one.log"])
    assert (tmp_path / "ended").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
@pytest.mark.parametrize(
    ("named", "trained"),
    [
        ([], {"top1_chunk_1b": 7, "rwkv7_110m": 12, "mamba2_1b": 7, "delta_net_110m": 12}),
        (["rwkv5_110m", "mamba1_1b", "study/window_64"], {"rwkv5_110m": 12, "mamba1_1b": 7, "study_window_64": 12}),
    ],
)
def test_the_command_trains_on_one_and_two_gpus_and_prints_the_table(
    tmp_path: Path, named: list[str], trained: dict[str, int]
):
    status, said = train(tmp_path, SEQARCH, *named)
    assert status == 0, said
    assert len(list(tmp_path.glob("out/*/curves.csv"))) == 2 * len(trained)
    assert said[2:] == [
        f"| `{recipe}` | 1,000 | 2,000 | 2.00 | 1.5 and 2.5 GiB | 0.1000 |" for recipe in sorted(trained, reverse=True)
    ]
    rows = read_csv(tmp_path / "out/fsdp.csv")
    assert len(rows) == 2 * sum(trained.values())
    assert {(row["recipe"], row["gpus"]) for row in rows} == {(recipe, gpus) for recipe in trained for gpus in "12"}
