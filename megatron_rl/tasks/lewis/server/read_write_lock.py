"""Who may read what another changes, in an event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Standing:
    """Weights that many read and one changes: who changes waits for all who read, and lets no other begin."""

    def __init__(self) -> None:
        self._is_open, self._is_empty, self._change = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._is_open.set()
        self._num = 0

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        await self._is_open.wait()
        self._num += 1
        try:
            yield
        finally:
            self._num -= 1
            if not self._num:
                self._is_empty.set()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        async with self._change:
            self._is_open.clear()
            try:
                while self._num:
                    self._is_empty.clear()
                    await self._is_empty.wait()
                yield
            finally:
                self._is_open.set()
