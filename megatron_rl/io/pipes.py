"""Output into a pipe that may be closed early by its reader, as in `... | head`."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exit_with_reader() -> Iterator[None]:
    """End the process without an error message if the reader of its output ends.

    Use this only around code that prints and has no sockets, because writing to a closed socket
    would end the process too. In other threads than the main thread, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        sys.stdout.flush()
        signal.signal(signal.SIGPIPE, before)
