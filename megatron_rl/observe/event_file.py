"""TensorBoard's file of scalars, written by the caller's thread: errors of TensorBoard's own writer, which has another, come late and as a
traceback.
"""

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

_NUMBERS = itertools.count()
"""Numbers the files of this process: TensorBoard orders files by their second, then by this number."""


class EventFile:
    def __init__(self, folder: Path, *, start_step: int) -> None:
        """A new file. Readers drop what earlier files of the folder have of `start_step` and later ones."""
        from tensorboard.compat.proto.event_pb2 import Event  # here: ranks without a log do not need TensorBoard
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = (folder / name).open("wb")
        self._records, self._event = RecordWriter(self._file), Event
        self._write(file_version="brain.Event:2")
        self._write(step=start_step, session_log={"status": "START"})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Return when the operating system has them. OSError: it does not take them."""
        self._write(step=step, summary={"value": [{"tag": name, "simple_value": value} for name, value in metrics.items()]})

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: object) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()
