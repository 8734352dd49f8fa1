"""A package adds a command by an entry point."""

import pytest

from seqarch import cli

WORKING = """
from seqarch.cli.commands import Command
COMMAND = Command(
    "Greet.", lambda parser: parser.add_argument("--name"), lambda args: print(args.name, args.options), "--x".__eq__
)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with the command `greet`."""

    def make(code):
        (tmp_path / "greeting.py").write_text(code)
        (tmp_path / "greeting-1.dist-info").mkdir()
        (tmp_path / "greeting-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1\n")
        (tmp_path / "greeting-1.dist-info/entry_points.txt").write_text("[seqarch.commands]\ngreet=greeting:COMMAND\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(__import__("sys").modules, "greeting", raising=False)

    return make


def refused(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        cli.main([*args])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_the_command_runs_with_its_options_and_stands_in_the_help(install, capsys):
    install(WORKING)
    cli.main(["greet", "--name", "Ada", "--x=1"])
    assert capsys.readouterr().out == "Ada {'x': '1'}\n"
    cli.main(["--help"])
    assert "greet" in capsys.readouterr().out
    assert "unknown option --y" in refused(capsys, "greet", "--y=1")
    assert "unknown command 'gret': did you mean greet?" in refused(capsys, "gret")


@pytest.mark.parametrize(
    ("code", "said"), [("import nosuch", "No module named 'nosuch'"), ("COMMAND = 3", "is not a seqarch.cli.commands")]
)
def test_a_broken_package_is_named_in_one_line(install, capsys, code, said):
    install(code)
    error = refused(capsys, "greet")
    assert "command 'greet' of package greeting (greeting:COMMAND)" in error
    assert said in error
    assert error.count("\n") == 1
    cli.main(["--help"])
    assert "greet" in capsys.readouterr().out
