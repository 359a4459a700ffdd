"""Who may read what another changes, in an event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ReadWriteLock:
    """Weights that many read and one changes: who changes waits for all who read, and lets no other begin."""

    def __init__(self) -> None:
        self._can_read, self._no_readers, self._write_mutex = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._can_read.set()
        self._num_readers = 0

    @asynccontextmanager
    async def read_lock(self) -> AsyncIterator[None]:
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
        async with self._write_mutex:
            self._can_read.clear()
            try:
                while self._num_readers:
                    self._no_readers.clear()
                    await self._no_readers.wait()
                yield
            finally:
                self._can_read.set()
