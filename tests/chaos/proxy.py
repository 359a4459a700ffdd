"""A TCP proxy between a run and a server that can be cut, delayed and redirected."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Coroutine
from typing import Self

PIECE = 1 << 16


class Proxy:
    """Listens on its own port and forwards bytes to `target` and back.

    As a context manager, it runs in a thread.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        """Destination port on 127.0.0.1."""
        self.is_cut = False
        self.delay_s = 0.0
        """Delay in seconds before each received piece of data is forwarded."""
        self.cut_share = 0.0
        """Fraction of the received pieces that are dropped; both connections are closed instead."""
        self.num_cut = 0
        self._dice = random.Random(0)
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def lead_to(self, port: int) -> None:
        """Redirect new connections to another port and close the existing connections."""
        self.target = port
        self._do(self._break())

    def cut(self) -> None:
        """Close all connections, and new ones as well, until `mend` is called."""
        self.is_cut = True
        self._do(self._break())

    def mend(self) -> None:
        self.is_cut, self.delay_s = False, 0.0

    def _do(self, work: Coroutine[object, object, object]) -> object:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    async def _break(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _end(self) -> None:
        self._server.close()
        await self._break()
        await asyncio.sleep(0.05)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if not self.is_cut:
                there, back = await asyncio.open_connection("127.0.0.1", self.target)
                self._open.add(back)
                await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        except OSError:
            writer.transport.abort()
        finally:
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE):
                await asyncio.sleep(self.delay_s)
                if self._dice.random() < self.cut_share:
                    self.num_cut += 1
                    writer.transport.abort()
                    break
                writer.write(piece)
                await writer.drain()
        self._open.discard(writer)
        writer.close()
