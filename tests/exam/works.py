"""What the processes of `Worker` do in tests. The module imports nothing slow."""

import os
import signal
import time


def die(call):
    """Work that is killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def see(call):
    """Work that answers with the GPUs that it sees and the threads that it is given."""
    return f"sees {os.environ.get('CUDA_VISIBLE_DEVICES')}, threads {os.environ.get('OMP_NUM_THREADS')}"


def linger(call):
    """Work that does not end by itself."""
    time.sleep(600)
    return ""


def echo(call):
    """Work that answers with its arguments."""
    return " ".join(call)


def join(call):
    """Work that joins other processes, which a process can do once."""
    if "LOCAL_RANK" in os.environ:
        return "the others are no more"
    os.environ["LOCAL_RANK"] = "0"
    return ""
