"""Which code ran: versions of packages and the commit of seqarch's own source."""

import importlib.metadata
import subprocess
from pathlib import Path

import seqarch


def version(package: str) -> str | None:
    """The installed version of a package, `None` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of seqarch's own source, marked where it was changed; `None` for an installed package."""
    command = ["git", "-C", str(Path(seqarch.__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
