"""The commit of seqarch: read from its own checkout or pip's record, and no repository's settings run a command."""

import json
import subprocess

import pytest

import seqarch
from seqarch.versions import commit

HOSTILE = """\
[core]
	fsmonitor = touch PWN
	hooksPath = hooks
	pager = touch PWN
	sshCommand = touch PWN
[filter "own"]
	clean = touch PWN; cat
	smudge = touch PWN; cat
	process = touch PWN
[diff]
	external = touch PWN
[diff "own"]
	textconv = touch PWN; cat
	command = touch PWN
"""


def git(folder, *args):
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *who, *args], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A repository with a package in it, whose settings would run a command."""

    def make(root):
        git(tmp_path, "init", "-q")
        (tmp_path / root / "seqarch").mkdir(parents=True)
        file = tmp_path / root / "seqarch/__init__.py"
        file.write_text("")
        monkeypatch.setattr(seqarch, "__file__", str(file))
        (tmp_path / ".gitattributes").write_text("* filter=own diff=own\n")
        (tmp_path / "pyproject.toml").write_text('[project]\nname = "seqarch"\n')
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", "one")
        (tmp_path / "hooks").mkdir()
        for hook in ("post-index-change", "fsmonitor-watchman", "reference-transaction"):
            (tmp_path / "hooks" / hook).write_text("#!/bin/sh\ntouch PWN\n")
            (tmp_path / "hooks" / hook).chmod(0o755)
        with (tmp_path / ".git/config").open("a") as config:
            config.write(HOSTILE)
        monkeypatch.chdir(tmp_path)
        return file

    yield make
    assert not list(tmp_path.rglob("PWN"))


def test_commit_of_an_enclosing_repository_is_not_ours(package):
    package("venv/lib/site-packages")
    assert commit() is None


def test_pip_records_the_commit_of_an_installed_package(package):
    record = package("site").parents[1] / "seqarch-0.2.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: seqarch\nVersion: 0.2.0\n")
    (record / "direct_url.json").write_text(json.dumps({"vcs_info": {"vcs": "git", "commit_id": "f" * 40}}))
    assert commit() == "f" * 40


@pytest.mark.parametrize("packed", [False, True])
def test_a_checkout_has_its_own_commit(package, tmp_path, packed):
    file = package(".")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert commit() == head
    if packed:
        git(tmp_path, "-c", "core.hooksPath=none", "pack-refs", "--all")
        assert commit() == head
    file.write_text("changed = True\n")
    assert commit() == f"{head}-dirty"


def test_a_worktree_has_its_own_commit(package, tmp_path, monkeypatch):
    package(".")
    (tmp_path / ".git/config").write_text("")
    git(tmp_path, "worktree", "add", "-q", tmp_path / "other")
    git(tmp_path / "other", "commit", "-qm", "two", "--allow-empty")
    head = git(tmp_path / "other", "rev-parse", "HEAD")
    monkeypatch.setattr(seqarch, "__file__", str(tmp_path / "other/seqarch/__init__.py"))
    assert commit() == head != git(tmp_path, "rev-parse", "HEAD")
