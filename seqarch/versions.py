"""Which code ran: versions of packages and the commit of seqarch's own source."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import seqarch


def version(package: str) -> str | None:
    """The installed version of a package, `None` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of seqarch's own source, `None` if it is unknown.

    In a checkout of seqarch this is the commit of HEAD, with `-dirty` after it if tracked files differ. For a package
    that pip installed from a repository it is the commit in pip's record. A repository around the package is not asked.
    """
    root = Path(seqarch.__file__).parents[1]
    project = root / "pyproject.toml"
    try:
        if project.is_file() and 'name = "seqarch"' in project.read_text(encoding="utf-8").splitlines():
            return _of_checkout(root)
        (package,) = importlib.metadata.distributions(name="seqarch", path=[str(root)])
        return json.loads(package.read_text("direct_url.json") or "{}")["vcs_info"]["commit_id"]
    except (OSError, ValueError, LookupError, subprocess.CalledProcessError):
        return None


def _of_checkout(root: Path) -> str:
    """What git says of a checkout. Its settings, hooks and filters may be commands, so git sees none of them."""
    git = root / ".git"
    own = git if git.is_dir() else root / git.read_text(encoding="utf-8").removeprefix("gitdir: ").strip()
    common = own / "commondir"  # only in a worktree
    shared = own / common.read_text(encoding="utf-8").strip() if common.is_file() else own
    with tempfile.TemporaryDirectory() as folder:
        for name in ("HEAD", "index"):
            shutil.copyfile(own / name, Path(folder, name))
        for name in ("refs", "packed-refs", "objects"):
            Path(folder, name).symlink_to((shared / name).absolute())
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment = {**inherited, "GIT_DIR": folder, "GIT_WORK_TREE": str(root)}
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
