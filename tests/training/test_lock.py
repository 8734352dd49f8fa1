"""Two processes cannot train into one run folder. A killed process does not block it."""

import os
import signal

import pytest

from seqarch.errors import UserError
from seqarch.training.lock import RunLock
from tests.processes import SERVER


def hold(run, ready):
    lock = RunLock(run)
    lock.acquire()
    ready.set()
    signal.pause()


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of the folder `run`."""
    ready = SERVER.Event()
    process = SERVER.Process(target=hold, args=(tmp_path / "run", ready))
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join()


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path, holder, capsys):
    lock = RunLock(tmp_path / "run")
    with pytest.raises(UserError, match=rf"process {holder.pid} on host {os.uname().nodename} trains into .*run"):
        lock.acquire()
    assert not lock.held
    holder.kill()
    holder.join()
    lock.acquire()
    assert f"process {holder.pid} on host" in capsys.readouterr().err
    lock.release()
    assert not any((tmp_path / "run").iterdir())


def test_a_second_run_in_one_process(tmp_path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    with pytest.raises(UserError, match=f"process {os.getpid()} on host .* trains into"):
        second.acquire()
    second.release()  # holds nothing
    first.release()
    second.acquire()
    second.release()
