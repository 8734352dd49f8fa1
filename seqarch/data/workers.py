"""Worker processes for preparing text."""

import concurrent.futures
import multiprocessing
import os
import signal
import threading


def worker_pool(workers: int | None = None) -> concurrent.futures.ProcessPoolExecutor:
    """A pool whose workers leave interrupts to the main process, and end with it even when it is killed.

    Workers are spawned: forking would copy threads that the caller may have started, in the middle of whatever they do.
    """
    return concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _follow_parent)


def _follow_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
