"""The command line. The installed command imports the rest only when Python no longer looks in the current folder."""

import os
import sys


def main(args: list[str] | None = None) -> None:
    """The command `seqarch`, or the command in `args`. An error of the user gives one line on stderr and status 2."""
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.exit("seqarch: error: the current folder was deleted: change to a folder that exists")
    if args is None:
        leave_current_folder()
    os.environ["MPLBACKEND"] = "agg"  # no figure is shown, and matplotlib refuses to be imported with a wrong one
    from seqarch.cli import app

    app.main(sys.argv[1:] if args is None else args)


def run(args: list[str]) -> None:
    """Run one command; errors are raised."""
    from seqarch.cli import app

    app.run(args)


def leave_current_folder() -> None:
    """Let this process and those that it starts import nothing from the current folder, where others' files may lie.

    An empty or relative entry of PYTHONPATH leads there, and so does `python -m` in a process that we start.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    absolute = [entry for entry in entries if os.path.isabs(entry)]
    if len(absolute) == len(entries) or not os.environ.get("PYTHONPATH"):
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(absolute)
    relative = {os.path.abspath(entry) for entry in entries} - {*map(os.path.abspath, absolute)}
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) not in relative]
    import site

    for folder in site.getsitepackages():
        site.addsitedir(folder)  # a package that was installed from here with `pip install -e` stays
