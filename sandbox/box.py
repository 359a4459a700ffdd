"""One box: the calls of one episode, the interpreter that answers them, and its replacement when it was killed."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sandbox import frames, images, replies
from sandbox.keeper import Exit, Life
from sandbox.types import BoxClosed, Error, Fault, Limits, Result, SandboxFault, Usage

if TYPE_CHECKING:
    from sandbox.cgroups import Group
    from sandbox.keeper import Keeper

MESSAGES = {
    "time": "the call ran longer than {limits.call_s:g} s",
    "memory": "the code used more than {limits.memory} bytes of memory",
    "cpu": "the code used more than {limits.cpu_s} s of processor time in all",
    "processes": "the code had more than {limits.processes} processes and threads",
    "system call": "the code made a system call that no program here may make",
}
"""limit -> why the box was killed; what follows is the same for all."""
DYING_S = 2.0
CONSEQUENCE = "its processes were killed; variables, imports and files of earlier calls are lost"


class Box:
    """One episode's Python. One call at a time; a second waits for the first. `async with` closes it."""

    def __init__(
        self, number: int, *, keeper: "Keeper", limits: Limits, group: "Group | None",
        begin: Callable[["Box"], Awaitable[Life]], release: Callable[["Box"], Awaitable[None]],
    ) -> None:  # fmt: skip
        """For the pool: `begin` makes a fresh interpreter with the inputs, `release` takes the place back."""
        self.id = number
        self.life: Life | None = None
        self._keeper, self._limits, self._group, self._begin, self._release = keeper, limits, group, begin, release
        self._lock = asyncio.Lock()
        self._calls = 0
        self._allowance = images.Allowance(limits)
        self._lost = False
        self._closing: asyncio.Task[None] | None = None
        self._out_of_memory = 0

    async def run(self, code: str, *, timeout_s: float | None = None) -> Result:
        """Execute `code` in the box's namespace; a cancelled run kills the box's processes.

        Raises BoxClosed; all other trouble is in the result.
        """
        async with self._lock:
            self._check_open()
            self._calls += 1
            if len(code) > self._limits.code:
                reason = f"the source has {len(code)} characters, {self._limits.code} are allowed"
                return Result(id=self._calls, fault=Fault.CODE, limit="code", error=Error(type="CodeTooLong", message=reason))
            try:
                life = await self._living()
            except (SandboxFault, ValueError) as error:  # ValueError: what opened once does not open again
                return self._host_fault(str(error))
            lost, self._lost = self._lost, False
            try:
                result = await self._call(life, code, seconds=self._limits.call_s if timeout_s is None else timeout_s, state_lost=lost)
            except BaseException:  # cancelled: the client is gone while its code still runs
                await asyncio.shield(self._end(life))
                raise
            self._check_open()
            return result

    async def fetch(self, names: Sequence[str]) -> dict[str, bytes]:
        """Contents of files of the working directory; a name that is no readable file of at most `Limits.file` bytes is left out, and so
        is one that would take all of them together past `Limits.fetched`."""
        async with self._lock:
            self._check_open()
            self._calls += 1
            try:
                life = await self._living()
            except (SandboxFault, ValueError):
                return {}
            try:
                async with asyncio.timeout(self._limits.call_s):
                    life.writer.write(frames.pack({"id": self._calls, "names": list(names)}))
                    most = min(self._limits.file * len(names), self._limits.fetched)
                    frame = await frames.read(life.reader, max_bytes=most)
                return replies.parse_files(frame, number=self._calls, asked=set(names), limits=self._limits)
            except (TimeoutError, frames.Malformed, asyncio.IncompleteReadError, ConnectionError):
                await self._end(life)
                return {}
            except BaseException:
                await asyncio.shield(self._end(life))
                raise

    async def close(self) -> None:
        """Kill what runs and free the place, also when whoever waits for it is cancelled. Twice is once."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def start(self) -> None:
        """For the pool: the first interpreter."""
        async with self._lock:
            await self._living()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _close(self) -> None:
        if self.life is not None:
            await self._keeper.end(self.life)
        async with self._lock:  # a call that was running has seen the end of its interpreter
            if self.life is not None:
                await self._end(self.life)
            await self._release(self)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise BoxClosed(f"box {self.id} is closed")

    async def _living(self) -> Life:
        if self.life is not None and self.life.ended.done():  # killed between two calls, by a thread it had left behind
            await self._end(self.life)
        if self.life is None:
            self.life = await self._begin(self)
            self._out_of_memory = self._group.out_of_memory() if self._group else 0
        self._check_open()
        return self.life

    async def _call(self, life: Life, code: str, *, seconds: float, state_lost: bool) -> Result:
        for stream in life.streams:
            os.ftruncate(stream, 0)
        began = time.perf_counter()
        reply, trouble, late = None, "", False
        try:
            async with asyncio.timeout(seconds):
                life.writer.write(frames.pack({"id": self._calls, "code": code}))
                frame = await frames.read(life.reader, max_bytes=self._limits.images * self._limits.image_bytes)
            reply = replies.parse(frame, number=self._calls, limits=self._limits, allowance=self._allowance)
        except TimeoutError:
            late = True
        except (asyncio.IncompleteReadError, ConnectionError):
            trouble = "gone"
        except frames.Malformed as error:
            trouble = f"the box spoke nonsense: {error}"
        wall_s = time.perf_counter() - began
        text, text_cut = replies.read_stream(life.streams[0], what="text", limits=self._limits)
        stderr, stderr_cut = replies.read_stream(life.streams[1], what="stderr", limits=self._limits)
        dropped = tuple(cut for cut in (text_cut, stderr_cut) if cut is not None)
        texts = {"id": self._calls, "text": text, "stderr": stderr, "state_lost": state_lost}
        if reply is None:
            if trouble == "gone":  # the channel ends before the process does, unless the code closed it and lives on
                await asyncio.wait([life.ended], timeout=DYING_S)
            exit_ = await self._end(life)
            fault, limit, error = self._verdict(life, exit_, late=late, trouble=trouble, seconds=seconds)
            return Result(**texts, fault=fault, limit=limit, error=error, dropped=dropped, usage=Usage(wall_s=wall_s, cpu_s=exit_.cpu_s))
        return Result(
            **texts,
            fault=Fault.CODE if reply.error else Fault.NONE,
            images=reply.pictures,
            error=reply.error,
            limit=reply.limit if reply.error else None,
            files=reply.files,
            dropped=dropped + reply.dropped,
            usage=Usage(wall_s=wall_s, cpu_s=reply.cpu_s, memory=reply.memory),
        )

    async def _end(self, life: Life) -> Exit:
        exit_ = await self._keeper.end(life)
        life.forget()
        self.life, self._lost = None, True
        return exit_

    def _verdict(self, life: Life, exit_: Exit, *, late: bool, trouble: str, seconds: float) -> tuple[Fault, str | None, Error]:
        """Whose doing it was that the box is dead, and what did it."""
        limit = "time" if late else life.verdict or self._limit_of(exit_)
        if limit is not None:
            shown = f"the call ran longer than {seconds:g} s" if late else MESSAGES[limit].format(limits=self._limits)
            return Fault.CODE, limit, Error(type="LimitExceeded", message=f"{shown}: {CONSEQUENCE}")
        if exit_.status is None:
            return Fault.HOST, None, Error(type="SandboxFault", message="the zygote died, and the box with it")
        ended = os.waitstatus_to_exitcode(exit_.status)
        if life.killed:
            message = "the code closed the interpreter's channel" if trouble == "gone" else trouble
            return Fault.CODE, None, Error(type="InterpreterBroken", message=f"{message}: {CONSEQUENCE}")
        if ended == -signal.SIGKILL and self._keeper.layers.pid_ns:  # nothing inside a pid namespace can kill its first process
            return Fault.HOST, None, Error(type="SandboxFault", message="somebody on the host killed the box: out of memory?")
        how = signal.Signals(-ended).name if ended < 0 else f"exit status {ended}"
        return Fault.CODE, None, Error(type="InterpreterDied", message=f"the code ended its own interpreter ({how}): {CONSEQUENCE}")

    def _limit_of(self, exit_: Exit) -> str | None:
        if exit_.status is None or not os.WIFSIGNALED(exit_.status):
            return None
        number = os.WTERMSIG(exit_.status)
        if number == signal.SIGSYS:
            return "system call"
        if number == signal.SIGKILL and self._group is not None and self._group.out_of_memory() > self._out_of_memory:
            return "memory"
        if number in (signal.SIGKILL, signal.SIGXCPU) and exit_.cpu_s >= self._limits.cpu_s:
            return "cpu"
        return None

    def _host_fault(self, reason: str) -> Result:
        lost, self._lost = self._lost, True
        return Result(id=self._calls, fault=Fault.HOST, error=Error(type="SandboxFault", message=reason), state_lost=lost)
