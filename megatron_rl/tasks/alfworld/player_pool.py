"""Players: processes that run TextWorld, one for each episode on its way, used again by the next. The event loop never waits for one.

A player that raises, is killed or takes too long fails the one episode that it plays (InfraError); the next one gets another.
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

from megatron_rl.errors import InfraError, PermanentInfraError

MAX_GAMES = 200
"""Of one player; then another takes its place."""
SLACK_S = 5.0
"""What a player that should have been ended by the kernel is waited for."""
LOAD_S = 300.0
"""What a keeper may take for its imports, beside the seconds for its game; one that is silent longer hangs."""
MAX_ANSWER_BYTES = 1 << 20


@dataclass(slots=True)
class Player:
    """This end of the channel to one process."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    seconds: float
    is_free: bool = True
    """Every question has its answer. A player that is left in the midst of one is of no use any more."""
    num_games: int = 0

    async def ask(self, **question: object) -> dict[str, object]:
        """One question and its answer (keeper.play). InfraError: there is none."""
        assert self.is_free, "the player still answers, or is gone"
        self.is_free = False
        self.num_games += "game" in question
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.seconds + SLACK_S):
                self.writer.write(json.dumps(question).encode() + b"\n")
                await self.writer.drain()
                line = await self.reader.readline()
        except TimeoutError as late:
            raise InfraError(self._failed(question, f"no answer in {self.seconds:g} s, task.options.call_s")) from late
        except OSError as gone:
            raise InfraError(self._failed(question, str(gone))) from gone
        spent = time.monotonic() - started
        if not line.endswith(b"\n"):
            raise InfraError(self._failed(question, f"its process ended after {spent:.1f} s of {self.seconds:g} (task.options.call_s)"))
        answer = json.loads(line)
        if "fault" in answer:
            raise InfraError(self._failed(question, answer["fault"]))
        self.is_free = True
        return answer

    def _failed(self, question: dict[str, object], reason: str) -> str:
        return f"TextWorld failed at {json.dumps(question)}: {reason}"

    @property
    def is_there(self) -> bool:
        """As far as the event loop has heard."""
        return not self.reader.at_eof()

    def close(self) -> None:
        self.writer.close()


class Players:
    """At most `size` at once; whoever asks for a further one waits. Nothing is started before the first is asked for."""

    def __init__(self, size: int, *, seconds: float) -> None:
        self.size, self.seconds = size, seconds
        self._keeper: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._places = asyncio.Semaphore(size)
        self._hiring = asyncio.Lock()
        self._idle: list[Player] = []

    async def take(self, game: str) -> Player:
        """A player to oneself; the game is what a new keeper reads first. Give it back."""
        await self._places.acquire()
        try:
            while self._idle:
                player = self._idle.pop()
                if player.is_there:
                    return player
                player.close()
            return await self._hire(game)
        except BaseException:
            self._places.release()
            raise

    def give_back(self, player: Player) -> None:
        if player.is_free and player.num_games < MAX_GAMES:
            self._idle.append(player)
        else:
            player.close()
        self._places.release()

    async def close(self) -> None:
        """End all processes, those too that play."""
        for player in self._idle:
            player.close()
        self._idle.clear()
        self._dismiss()

    async def _hire(self, game: str) -> Player:
        async with self._hiring:
            if self._keeper is None or self._keeper.poll() is not None:
                await self._open(game)
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._control, [b"p"], [theirs.fileno()])
                except OSError as gone:
                    ours.close()
                    self._dismiss()
                    raise InfraError(f"TextWorld's keeper is gone: {gone}") from gone
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_ANSWER_BYTES)
        return Player(reader, writer, self.seconds)

    async def _open(self, game: str) -> None:
        """Start the keeper, in a session of its own: Ctrl-C is for the run, which may still need it. PermanentInfraError: it does not
        load."""
        self._dismiss()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs:
            command = [sys.executable, "-m", "megatron_rl.tasks.alfworld.player_server", str(theirs.fileno()), str(self.seconds), game]
            environment = {**os.environ, "PYTHONHASHSEED": "0"}  # so that sets have the same order in every run
            self._keeper = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        has_loaded = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOAD_S + self.seconds):
                has_loaded = await asyncio.get_running_loop().sock_recv(self._control, 1)
        if not has_loaded:
            self._dismiss()
            raise PermanentInfraError(
                f"TextWorld did not load {game}, or not in {self.seconds:g} s (task.options.call_s); its words stand above"
            )

    def _dismiss(self) -> None:
        """The keeper, and with it its players, idle or not."""
        if self._keeper is not None and self._control is not None:
            self._control.close()
            self._keeper.kill()
            self._keeper.wait()
        self._keeper = self._control = None
