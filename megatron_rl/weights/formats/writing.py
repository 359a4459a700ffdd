"""Files of tensors, written from front to end, on their way to the disk while they grow."""

import io
import os
from pathlib import Path

import torch

WRITE_BYTES = 64 << 20
"""After so many bytes the kernel is told to begin writing them out, so that fsync finds little left to do."""


class SteadyFile(io.FileIO):
    """A new file without a buffer. Raises OSError naming it (disk full), from whichever call notices."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.path = path
        self._waiting = 0

    def write(self, data: bytes | memoryview) -> int:
        """All of the data, where the file stands."""
        left = memoryview(data).cast("B")
        num_bytes = len(left)
        try:
            while left:
                written = super().write(left[: WRITE_BYTES - self._waiting])
                left = left[written:]
                self._waiting += written
                if self._waiting == WRITE_BYTES:
                    # Linux begins to write out the pages it is told nobody needs, and does not wait for them (mm/fadvise.c).
                    os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    self._waiting = 0
        except OSError as error:
            raise self._named(error) from error
        return num_bytes

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """The numbers of a tensor on CPU, row by row."""
        self.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))

    def finish(self) -> None:
        """Wait until all of it is on the disk, and close it."""
        try:
            os.fsync(self.fileno())
        except OSError as error:
            raise self._named(error) from error
        self.close()

    def _named(self, error: OSError) -> OSError:
        return OSError(f"{self.path.name}: {error.strerror}")
