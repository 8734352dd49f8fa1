"""Worker processes for preparing text."""

import concurrent.futures
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import Any


def worker_pool(workers: int | None = None) -> concurrent.futures.ProcessPoolExecutor:
    """A pool whose workers leave interrupts to the main process, and end with it even when it is killed.

    Workers are spawned: forking would copy threads that the caller may have started, in the middle of whatever they do.
    They do not import the caller's script, which may lack the guard `if __name__ == "__main__"` and would run again.
    """
    return _Pool(workers, multiprocessing.get_context("spawn"), follow_parent, (os._exit, 1))


class _Pool(concurrent.futures.ProcessPoolExecutor):
    def submit(self, *call: Any, **options: Any) -> concurrent.futures.Future:
        """Submit a call, which may start workers; hides the main module, which they would import before their work."""
        script = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            return super().submit(*call, **options)
        finally:
            sys.modules["__main__"] = script


def follow_parent(end: Callable[..., object], *args: Any) -> None:
    """Leave Ctrl-C to the parent process, and call `end`, which ends this process, when the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(end, *args), daemon=True).start()


def _end_with_parent(end: Callable[..., object], *args: Any) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    end(*args)
