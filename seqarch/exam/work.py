"""The process of `seqarch exam` that trains: takes arguments of `fit`, answers with what went wrong."""

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from multiprocessing.connection import Connection, wait

import torch

from seqarch.errors import UserError, of_storage, one_line
from seqarch.exam.worker import Asked
from seqarch.experiment.experiment import Experiment


def work(connection: Connection) -> None:
    """Train what comes until the connection closes; the exam handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_stop_with_the_exam, daemon=True).start()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with contextlib.suppress(EOFError, OSError):  # the connection is closed
        while True:
            connection.send(fit(connection.recv()))


def fit(args: Asked) -> str:
    """One run or trial in this process; "" or what went wrong, on one line."""
    torch._dynamo.reset()  # compiled code of the run before counts against the limit of recompilations
    try:
        if isinstance(args, dict):
            Experiment.from_recipe(**args).try_out()
        else:
            sys.argv[1:] = ["fit", *args]  # what Lightning starts on the other devices of a run
            Experiment(args).fit(figures=False)  # the exam draws all runs together
    except UserError as error:
        return one_line(error)
    except SystemExit as stop:
        return f"it ended with status {stop.code}" if stop.code else ""
    except Exception as error:  # a bug of a mixer must not take the other runs with it
        return (of_storage(error) if isinstance(error, OSError) else None) or _traced(error)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return ""


def _traced(error: Exception) -> str:
    traceback.print_exception(error)
    first, *_ = [*str(error).splitlines(), ""]  # compilers print hundreds of lines
    return one_line(f"{type(error).__name__}: {first}")


def _stop_with_the_exam() -> None:
    """If the exam itself was killed, stop as for SIGTERM: write a checkpoint and end."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
