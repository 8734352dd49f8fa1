"""What the processes of `Worker` do in tests. The module imports nothing slow."""

import os
import signal


def die(connection):
    """Work that is killed."""
    connection.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def see(connection):
    """Work that answers with the GPUs that it sees and the threads that it is given."""
    connection.recv()
    connection.send(f"sees {os.environ.get('CUDA_VISIBLE_DEVICES')}, threads {os.environ.get('OMP_NUM_THREADS')}")


def linger(connection):
    """Work that never answers."""
    connection.recv()
    connection.recv()


def echo(connection):
    """Work that answers with its arguments, and ends when the connection does."""
    try:
        while True:
            connection.send(" ".join(connection.recv()))
    except EOFError:
        pass
