"""The lock of a run folder: one process trains into it at a time."""

import json
import os
import socket
import sys
from pathlib import Path

import filelock

from seqarch.errors import one_line, refused, say
from seqarch.runs.files import parse_json
from seqarch.runs.layout import LOCK


class RunLock:
    """Holds `RUN/lock`, which says which process trains into the folder; the system frees it when that process ends.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / LOCK
        self._lock = filelock.FileLock(self.path, timeout=0)

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._lock.is_locked

    def acquire(self) -> None:
        """Take the lock, also from a process that was killed.

        Raises:
            UserError: another process trains into the folder; the message names it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = self._owner()
        trains = f"{before or 'another process'} trains into {self.path.parent}"
        with refused(f"{trains}: wait for it or stop it, or choose another --run_dir", filelock.Timeout):
            self._lock.acquire()
        if before:
            say(f"{before} left {self.path.parent} without ending its run; this process goes on", file=sys.stderr)
        self.path.write_text(json.dumps({"host": socket.gethostname(), "process": os.getpid()}) + "\n")

    def release(self) -> None:
        """Release the lock if it is held."""
        if self.held:
            self.path.unlink(missing_ok=True)
            self._lock.release()

    def _owner(self) -> str:
        """The process that wrote the lock file last, in words; "" if the file does not say."""
        try:
            owner = parse_json(self.path.read_text(encoding="utf-8"), self.path)
            return one_line(f"process {owner['process']} on host {owner['host']}")
        except (OSError, ValueError, KeyError, TypeError):
            return ""
