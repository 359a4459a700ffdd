"""Pool of processes (players), each of which runs the TextWorld game of one episode at a time.

Requests never block the event loop. If a player raises an exception, is killed or exceeds its time
limit, only the player's current episode fails with InfraError. The next episode gets another
player.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import InfraError, PermanentInfraError

MAX_GAMES_PER_PLAYER = 200
"""Maximum number of games that one player process runs before a new process replaces it."""
KILL_SLACK_S = 5.0
"""Seconds to wait for a player after its time limit has passed. Normally the kernel ends the player
at the time limit.
"""
LOAD_TIMEOUT_S = 300.0
"""Time limit in seconds for the imports of the player server. The time limit for loading a game is
added to this value.
"""
MAX_ANSWER_BYTES = 1 << 20


@dataclass(slots=True)
class PlayerProcess:
    """Client side of the channel to one player process."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    timeout_s: float
    is_idle: bool = True
    """True if every request has been answered. A player with an unanswered request is never reused.
    """
    num_games: int = 0
    """Number of games that this player process has started."""

    async def send_request(self, **question: object) -> dict[str, Any]:
        """Send one request to the player and return its answer (see player_server.serve_player).

        Raises:
            InfraError: The player failed or did not answer in time.
        """
        assert self.is_idle, "the player still answers, or is gone"
        self.is_idle = False
        self.num_games += "game" in question
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s + KILL_SLACK_S):
                self.writer.write(json.dumps(question).encode() + b"\n")
                await self.writer.drain()
                line = await self.reader.readline()
        except TimeoutError as late:
            raise InfraError(self._error_text(question, f"no response within {self.timeout_s:g} s (task.options.call_s)")) from late
        except OSError as gone:
            raise InfraError(self._error_text(question, str(gone))) from gone
        spent = time.monotonic() - started
        if not line.endswith(b"\n"):
            raise InfraError(
                self._error_text(question, f"the player exited after {spent:.1f} s (limit: {self.timeout_s:g} s, task.options.call_s)")
            )
        answer = json.loads(line)
        if "fault" in answer:
            raise InfraError(self._error_text(question, answer["fault"]))
        self.is_idle = True
        return answer

    def _error_text(self, question: dict[str, object], reason: str) -> str:
        return f"TextWorld failed at {json.dumps(question)}: {reason}"

    @property
    def is_connected(self) -> bool:
        """True until the player closes its side of the channel."""
        return not self.reader.at_eof()

    def close(self) -> None:
        """Close the channel, which ends the player process."""
        self.writer.close()


class PlayerPool:
    """Pool of at most `size` player processes.

    If all players are in use, `acquire` waits for a player to be released. The player server, which
    forks the players, is started by the first call to `acquire`.
    """

    def __init__(self, size: int, *, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._slots = asyncio.Semaphore(size)
        self._spawn_lock = asyncio.Lock()
        self._idle: list[PlayerProcess] = []

    async def acquire(self, game: str) -> PlayerProcess:
        """Return a player for exclusive use. The caller must return the player with `release`.

        Args:
            game: Game file to load first if the player server must be started.

        Raises:
            InfraError: No player could be started.
        """
        await self._slots.acquire()
        try:
            while self._idle:
                player = self._idle.pop()
                if player.is_connected:
                    return player
                player.close()
            return await self._spawn_player(game)
        except BaseException:
            self._slots.release()
            raise

    def release(self, player: PlayerProcess) -> None:
        """Return a player to the pool, or close a player that cannot be reused."""
        if player.is_idle and player.num_games < MAX_GAMES_PER_PLAYER:
            self._idle.append(player)
        else:
            player.close()
        self._slots.release()

    async def close(self) -> None:
        """End all processes, including busy players."""
        for player in self._idle:
            player.close()
        self._idle.clear()
        self._stop_server()

    async def _spawn_player(self, game: str) -> PlayerProcess:
        async with self._spawn_lock:
            if self._server is None or self._server.poll() is not None:
                await self._start_server(game)
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._control, [b"p"], [theirs.fileno()])
                except OSError as gone:
                    ours.close()
                    self._stop_server()
                    raise InfraError(f"TextWorld's player server exited: {gone}") from gone
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_ANSWER_BYTES)
        return PlayerProcess(reader, writer, self.timeout_s)

    async def _start_server(self, game: str) -> None:
        """Start the player server.

        The server runs in its own session, so that Ctrl-C does not interrupt it. A run that is
        stopping still needs the server.

        Raises:
            PermanentInfraError: The server failed to start, or did not start in time.
        """
        self._stop_server()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs:
            command = [sys.executable, "-m", "megatron_rl.tasks.alfworld.player_server", str(theirs.fileno()), str(self.timeout_s), game]
            environment = {**os.environ, "PYTHONHASHSEED": "0"}  # makes the order of sets reproducible
            self._server = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        has_loaded = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOAD_TIMEOUT_S + self.timeout_s):
                has_loaded = await asyncio.get_running_loop().sock_recv(self._control, 1)
        if not has_loaded:
            self._stop_server()
            raise PermanentInfraError(
                f"TextWorld failed to load {game} or exceeded {self.timeout_s:g} s (task.options.call_s); see the output above"
            )

    def _stop_server(self) -> None:
        """End the server and all of its players, including busy players."""
        if self._server is not None and self._control is not None:
            self._control.close()
            self._server.kill()
            self._server.wait()
        self._server = self._control = None
