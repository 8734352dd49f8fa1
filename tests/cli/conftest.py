import pytest

from seqarch import cli


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
