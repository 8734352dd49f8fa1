import contextlib
import io

import pytest

from seqarch import cli
from tests.conftest import MODEL, TINY, flags


@pytest.fixture(scope="session")
def finished(shards, tmp_path_factory):
    """A finished run of four steps, for tests that only read it, and what was printed."""
    path = tmp_path_factory.mktemp("runs") / "first"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        cli.run(["fit", *flags(**{**TINY, **MODEL, "data.root": shards, "run_dir": path})])
    return path, said.getvalue()


@pytest.fixture(scope="session")
def run_dir(finished):
    return finished[0]


@pytest.fixture(scope="session")
def checkpoint(run_dir):
    return run_dir / "checkpoints/step_00000004.ckpt"


@pytest.fixture
def refuse(capfd, tmp_path, monkeypatch):
    """Runs a command that must be refused; returns what it says."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(arg) for arg in args])
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("seqarch: ")]
        assert stop.value.code == 2
        assert len(lines) == 1, lines
        assert lines[0].startswith("seqarch: error: ")
        return lines[0].removeprefix("seqarch: error: ")

    return run
