"""Writes TensorBoard scalar files in the calling thread.

TensorBoard's own writer uses a background thread, so write errors are reported late and as a
traceback.
"""

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

_NUMBERS = itertools.count()
"""Counter of the event files that this process has created.

TensorBoard orders files by creation time (in whole seconds), then by this number.
"""


class EventFile:
    """A TensorBoard event file that contains scalars."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        """Create a new file.

        If earlier files in the folder contain data for steps >= `start_step`, readers discard this
        data.
        """
        from tensorboard.compat.proto.event_pb2 import (  # ranks without a log do not need TensorBoard
            Event,  # pyright: ignore[reportAttributeAccessIssue]  the module creates its classes when it is imported
        )
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = (folder / name).open("wb")
        self._records, self._event = RecordWriter(self._file), Event
        self._write(file_version="brain.Event:2")
        self._write(step=start_step, session_log={"status": "START"})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step and flush them to the operating system.

        Raises:
            OSError: the operating system cannot write the metrics.
        """
        self._write(step=step, summary={"value": [{"tag": name, "simple_value": value} for name, value in metrics.items()]})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, **fields: object) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()
