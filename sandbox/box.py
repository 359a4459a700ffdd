"""Box that runs the calls of one episode. A killed interpreter is replaced by a new one."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megatron_rl_sandbox import fault_diagnosis, frames, image_codec, replies
from megatron_rl_sandbox.clock import BoxTimer
from megatron_rl_sandbox.records import BoxClosed, BoxLimits, CallError, CallResult, CallUsage, Fault, SandboxError, check_source_length
from megatron_rl_sandbox.zygote_manager import ExitStatus, Interpreter

if TYPE_CHECKING:
    from megatron_rl_sandbox.cgroups import ControlGroup
    from megatron_rl_sandbox.zygote_manager import ZygoteManager


class Box:
    """Isolated Python interpreter for one episode.

    The box runs one call at a time, and concurrent calls wait. Leaving the `async with` block
    closes the box.
    """

    def __init__(
        self, number: int, *, zygote: "ZygoteManager", limits: BoxLimits, group: "ControlGroup | None",
        start_interpreter: Callable[["Box"], Awaitable[Interpreter]], release_slot: Callable[["Box"], Awaitable[None]],
    ) -> None:  # fmt: skip
        """Create a box. Use `SandboxPool.open` instead of this constructor.

        Args:
            number: Id of the box.
            zygote: Zygote that forks the interpreters of the box.
            limits: Resource limits.
            group: Control group of the box's slot, if control groups are in use.
            start_interpreter: Function that returns a fresh interpreter with the inputs loaded.
            release_slot: Function that returns the slot of the box to the pool.
        """
        self.id = number
        self.interpreter: Interpreter | None = None
        self._zygote, self._limits, self._group, self._start_interpreter, self._release_slot = (
            zygote,
            limits,
            group,
            start_interpreter,
            release_slot,
        )
        self._lock = asyncio.Lock()
        self._num_calls = 0
        self._image_budget = image_codec.ImageBudget(limits)
        self._state_lost = False
        self._pending_host_fault = ""  # host fault that no call has reported yet
        self._closing: asyncio.Task[None] | None = None

    async def run(self, code: str, *, timeout_s: float | None = None) -> CallResult:
        """Execute `code` in the namespace of the box and return the result.

        Cancelling this coroutine kills the processes of the box.

        Raises:
            BoxClosed: The box is closed. All other failures are reported in the result.
        """
        async with self._lock:
            self._check_open()
            self._num_calls += 1
            if (refused := check_source_length(self._num_calls, code, limits=self._limits)) is not None:
                return refused
            await self._handle_early_exit()
            if self._pending_host_fault:
                reason, self._pending_host_fault = self._pending_host_fault, ""
                return self._host_fault(reason)
            try:
                life = await self._ensure_interpreter()
            except (SandboxError, ValueError) as error:  # ValueError: inputs that loaded before no longer load
                return self._host_fault(str(error))
            lost, self._state_lost = self._state_lost, False
            try:
                result = await self._execute_call(
                    life, code, seconds=self._limits.call_timeout_s if timeout_s is None else timeout_s, state_lost=lost
                )
            except BaseException:  # cancelled: the caller is gone while its code still runs
                await asyncio.shield(self._end_interpreter(life))
                raise
            self._check_open()
            return result

    async def fetch_files(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of files in the working directory, keyed by name.

        The result omits unreadable files, files larger than `BoxLimits.file` bytes, and files that
        would raise the total above `BoxLimits.max_fetch_bytes`. Raises BoxClosed if the box is
        closed.
        """
        async with self._lock:
            self._check_open()
            self._num_calls += 1
            await self._handle_early_exit()
            if self._pending_host_fault:  # reported by the next call
                return {}
            try:
                life = await self._ensure_interpreter()
            except (SandboxError, ValueError):
                return {}
            clock = self.make_timer(life, self._limits.call_timeout_s)
            try:
                async with clock:
                    life.writer.write(frames.pack_frame({"id": self._num_calls, "names": list(names)}))
                    most = min(self._limits.file * len(names), self._limits.max_fetch_bytes)
                    text, blobs = await frames.read_frame(life.reader, max_bytes=most, max_blobs=len(names))
                frame = await frames.parse_json(text), blobs
                return replies.parse_fetched_files(frame, number=self._num_calls, asked=set(names), limits=self._limits)
            except (asyncio.IncompleteReadError, ConnectionError):
                await self._zygote.wait_for_exit(life)
                await self._end_and_diagnose(life)
                return {}
            except (TimeoutError, frames.MalformedFrame):
                await self._end_interpreter(life)
                self._pending_host_fault = f"{fault_diagnosis.STARVED_MESSAGE}: fetching files did not finish" if clock.was_starved else ""
                return {}
            except BaseException:
                await asyncio.shield(self._end_interpreter(life))
                raise

    async def close(self) -> None:
        """Kill the processes and release the slot, even if the caller is cancelled.

        Further calls of this method have no effect.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def start(self) -> None:
        """Start the first interpreter."""
        async with self._lock:
            await self._ensure_interpreter()

    def reset_oom_counter(self) -> None:
        """Reset the OOM-kill counter of the box's control group.

        OOM kills counted after the reset are attributed to the current call.
        """
        if self._group is not None:
            self._group.reset_oom_counter()

    def make_timer(self, interpreter: Interpreter, seconds: float) -> BoxTimer:
        """Return a timer that limits the run time of one request to `seconds`."""
        layers = self._zygote.layers
        cpus = self._limits.cpus if layers.cgroup else 1.0
        return BoxTimer(seconds, pid=interpreter.pid, group=self._group, cpus=cpus, is_unstoppable=layers.pid_ns and layers.seccomp)

    def diagnose_death(self, interpreter: Interpreter, exit_: ExitStatus, *, channel_error: str) -> fault_diagnosis.FaultDiagnosis:
        """Return the fault, limit and error for an interpreter that died or was killed by the pool.

        Only OOM kills since the last `reset_oom_counter` are considered.
        """
        used_up = self._group is not None and self._group.was_oom_killed()
        return fault_diagnosis.diagnose_death(
            interpreter, exit_, layers=self._zygote.layers, limits=self._limits, out_of_memory=used_up, channel_error=channel_error
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _close(self) -> None:
        if self.interpreter is not None:
            await self._zygote.end_interpreter(self.interpreter)
        async with self._lock:  # held until a running call has noticed the end of its interpreter
            if self.interpreter is not None:
                await self._end_interpreter(self.interpreter)
            await self._release_slot(self)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise BoxClosed(f"box {self.id} is closed")

    async def _handle_early_exit(self) -> None:
        """Diagnose an interpreter that exited between two calls.

        The exit was caused by a background thread of the code, or by the host.
        """
        if self.interpreter is not None and self.interpreter.exit_future.done():
            await self._end_and_diagnose(self.interpreter)

    async def _end_and_diagnose(self, interpreter: Interpreter) -> None:
        """Terminate the interpreter, and record a host fault if the host caused the failure.

        The next call returns the recorded host fault and does not run its code. Otherwise, the code
        would run without the state of earlier calls, and its result would be scored.
        """
        exit_ = await self._end_interpreter(interpreter)
        fault, _, error = self.diagnose_death(interpreter, exit_, channel_error="gone")
        if fault is Fault.HOST:
            self._pending_host_fault = error.message

    async def _ensure_interpreter(self) -> Interpreter:
        if self.interpreter is None:
            self.interpreter = await self._start_interpreter(self)
        self._check_open()
        return self.interpreter

    async def _execute_call(self, interpreter: Interpreter, code: str, *, seconds: float, state_lost: bool) -> CallResult:
        for stream in interpreter.output_fds:
            os.ftruncate(stream, 0)
        self.reset_oom_counter()
        began = time.perf_counter()
        reply, trouble, late = None, "", False
        clock = self.make_timer(interpreter, seconds)
        try:
            async with clock:
                interpreter.writer.write(frames.pack_frame({"id": self._num_calls, "code": code}))
                most = self._limits.images * self._limits.image_bytes
                answer, blobs = await frames.read_frame(interpreter.reader, max_bytes=most, max_blobs=self._limits.images)
            frame = await frames.parse_json(answer), blobs
            reply = await replies.parse_reply_off_loop(frame, number=self._num_calls, limits=self._limits, budget=self._image_budget)
        except TimeoutError:
            late = True
        except (asyncio.IncompleteReadError, ConnectionError):
            trouble = "gone"
        except frames.MalformedFrame as error:
            trouble = f"the box spoke nonsense: {error}"
        wall_s = time.perf_counter() - began
        text, text_cut = replies.read_stream(interpreter.output_fds[0], what="text", limits=self._limits)
        stderr, stderr_cut = replies.read_stream(interpreter.output_fds[1], what="stderr", limits=self._limits)
        dropped = tuple(cut for cut in (text_cut, stderr_cut) if cut is not None)
        texts = {"id": self._num_calls, "text": text, "stderr": stderr, "state_lost": state_lost}
        if reply is None:
            if trouble == "gone":
                await self._zygote.wait_for_exit(interpreter)
            exit_ = await self._end_interpreter(interpreter)
            told = (
                fault_diagnosis.diagnose_timeout(seconds, was_starved=clock.was_starved)
                if late
                else self.diagnose_death(interpreter, exit_, channel_error=trouble)
            )
            fault, limit, error = told
            return CallResult(
                **texts, fault=fault, limit=limit, error=error, dropped=dropped, usage=CallUsage(wall_s=wall_s, cpu_s=exit_.cpu_s)
            )
        return CallResult(
            **texts,
            fault=Fault.CODE if reply.error else Fault.NONE,
            images=reply.pictures,
            error=reply.error,
            limit=reply.limit if reply.error else None,
            files=reply.files,
            dropped=dropped + reply.dropped,
            usage=CallUsage(wall_s=wall_s, cpu_s=reply.cpu_s, memory=reply.memory),
        )

    async def _end_interpreter(self, interpreter: Interpreter) -> ExitStatus:
        exit_ = await self._zygote.end_interpreter(interpreter)
        interpreter.close()
        self.interpreter, self._state_lost = None, True
        return exit_

    def _host_fault(self, reason: str) -> CallResult:
        lost, self._state_lost = self._state_lost, True
        return CallResult(id=self._num_calls, fault=Fault.HOST, error=CallError(type="SandboxError", message=reason), state_lost=lost)
