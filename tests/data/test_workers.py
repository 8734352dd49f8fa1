import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, sys
from seqarch.data.workers import worker_pool

if __name__ == "__main__":
    print(worker_pool(1).submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(SCRIPT)
    # The worker inherits the pipe of standard output: the read ends only when the worker is gone too.
    run = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, timeout=60, check=False)
    assert run.returncode == -9
    assert int(run.stdout) > 0


def test_workers_do_not_run_a_script_without_a_guard_again(tmp_path: Path) -> None:
    script = tmp_path / "bare.py"
    script.write_text(
        "from seqarch.data.workers import worker_pool\n"
        "print('begins', flush=True)\n"
        "with worker_pool(2) as pool:\n"
        "    print(list(pool.map(abs, [-1, -2])))\n"
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.returncode) == ("begins\n[1, 2]\n", 0), run.stderr
