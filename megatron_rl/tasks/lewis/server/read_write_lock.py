"""Readers-writer lock for asyncio."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ReadWriteLock:
    """Lock held either by any number of readers (requests) or by one writer (a weight update).

    A writer waits until all current readers have released the lock. While the writer waits, new
    readers are blocked.
    """

    def __init__(self) -> None:
        self._can_read, self._no_readers, self._write_mutex = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._can_read.set()
        self._num_readers = 0

    @asynccontextmanager
    async def read_lock(self) -> AsyncIterator[None]:
        """Hold the lock for reading inside the block."""
        await self._can_read.wait()
        self._num_readers += 1
        try:
            yield
        finally:
            self._num_readers -= 1
            if not self._num_readers:
                self._no_readers.set()

    @asynccontextmanager
    async def write_lock(self) -> AsyncIterator[None]:
        """Hold the lock for writing inside the block."""
        async with self._write_mutex:
            self._can_read.clear()
            try:
                while self._num_readers:
                    self._no_readers.clear()
                    await self._no_readers.wait()
                yield
            finally:
                self._can_read.set()
