"""Pool of boxes with a fixed number of slots.

A slot is used by at most one box at a time. Each slot has its own control group, user id and
directory.
"""

import asyncio
import os
import resource
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Self

import psutil
from PIL import Image

from megatron_rl_sandbox import cgroups, fault_diagnosis, frames
from megatron_rl_sandbox.box import Box
from megatron_rl_sandbox.inputs import BoxInput, collect_inputs
from megatron_rl_sandbox.layers import PROTECTIONS, Layers, choose_layers, detect_layers
from megatron_rl_sandbox.records import BoxClosed, BoxLimits, CallError, Fault, Isolation, PoolFull, SandboxError
from megatron_rl_sandbox.watchdog import ResourceWatchdog
from megatron_rl_sandbox.zygote_manager import ExitStatus, Interpreter, ZygoteManager

MAX_POOL_SIZE = 256
DESCRIPTORS_PER_BOX = 5
"""Number of open file descriptors per box.

The descriptors are the channel, two output streams, the control group's counter of OOM kills and,
in cgroup v1, the control group's memory peak.
"""
EXTRA_DESCRIPTORS = 32
"""Number of file descriptors reserved for other purposes, such as the zygote's socket."""
CLOSED_SLOT = -1
"""Sentinel that `close` puts into the queue of free slots."""


class SandboxPool:
    """Pool of at most `size` simultaneous boxes that share one zygote.

    With `layers=None`, the pool uses every layer that the host offers. With `isolation="none"`, the
    pool uses no layers. `allow_missing` names the protections that this host may lack (keys of
    `layers.PROTECTIONS`; `python -m megatron_rl_sandbox doctor` lists them).
    """

    layers: Layers
    """Isolation layers in use, set by `start`."""

    def __init__(
        self, *, size: int = 8, limits: BoxLimits | None = None, layers: Layers | None = None, isolation: str = Isolation.AUTO.value,
        allow_missing: Collection[str] = (),
    ) -> None:  # fmt: skip
        if not 1 <= size <= MAX_POOL_SIZE:
            raise ValueError(f"size={size}: must be from 1 to {MAX_POOL_SIZE}; use several pools for more boxes")
        self.size = size
        self.limits = limits or BoxLimits()
        self.isolation = Isolation(isolation)
        if layers is not None and self.isolation is Isolation.NONE:
            raise ValueError('layers and isolation="none" are mutually exclusive: remove one')
        if unknown := set(allow_missing) - set(PROTECTIONS):
            raise ValueError(f"allow_missing names unknown protections {', '.join(sorted(unknown))}: choose from {', '.join(PROTECTIONS)}")
        self._allow_missing = allow_missing
        self._requested_layers = Layers() if self.isolation is Isolation.NONE else layers
        self._started = False
        self._start_lock = asyncio.Lock()

    @property
    def num_open(self) -> int:
        """Number of open boxes."""
        return len(self._boxes)

    async def start(self) -> None:
        """Start the zygote and fork a spare interpreter for every slot.

        Raises:
            SandboxError: The host lacks layers or protections that isolation="auto" requires (the
                message lists them with reasons), the zygote does not start, or the pool needs more
                open files than the hard limit allows. The soft limit is raised as needed.
        """
        assert not self._started, "the pool is already running"
        _raise_file_limit(self.size)
        self.layers = (
            self._requested_layers
            if self._requested_layers is not None
            else choose_layers(detect_layers(), allow_missing=self._allow_missing)
        )
        self._free_slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(self.size):
            self._free_slots.put_nowait(slot)
        self._boxes: dict[int, tuple[Box, int, list[BoxInput], str]] = {}
        self._next_box_id = 0
        self._opening_interpreters: dict[int, Interpreter] = {}
        self._spare_interpreters: dict[int, asyncio.Task[Interpreter | None]] = {}
        try:
            self._control_groups = cgroups.ControlGroups(size=self.size, limits=self.limits) if self.layers.cgroup else None
        except OSError as error:
            raise SandboxError(f"cgroup: {error}") from error
        self._zygote = ZygoteManager(self.layers, self.limits)
        try:
            await self._zygote.start()
        except BaseException:
            self._remove_groups()
            raise
        self._fatal_error = ""
        self._watchdog = None
        if self.layers.watchdog:
            self._watchdog = ResourceWatchdog(
                self._zygote, list_interpreters=self._running_interpreters, limits=self.limits, on_failure=self._on_watchdog_failure
            )
        self._started = True
        for slot in range(self.size):
            self._prefork(slot)

    async def close(self) -> None:
        """Kill every box and the zygote, and remove their resources.

        Further calls have no effect.
        """
        if not self._started:
            return
        self._started = False
        if self._watchdog is not None:
            await self._watchdog.stop()
        self._free_slots.put_nowait(CLOSED_SLOT)
        try:
            await asyncio.gather(*(box.close() for box, *_ in list(self._boxes.values())), return_exceptions=True)
            for life in await asyncio.gather(*self._spare_interpreters.values(), return_exceptions=True):
                if isinstance(life, Interpreter):
                    await self._end_interpreter(life)
        finally:
            await self._zygote.stop()
            self._remove_groups()

    async def open(
        self,
        *,
        images: Mapping[str, Image.Image | bytes] | None = None,
        files: Mapping[str, bytes] | None = None,
        preload: str = "",
        wait_s: float | None = None,
    ) -> Box:
        """Open a box with `images` and `files`, run `preload` in the box and return the box.

        Args:
            images: Images keyed by name. The name `image_0` defines the variable `image_0` and the
                file image_0.png; the name `photo.jpg` defines that file and the variable `photo`.
            files: Contents of files, keyed by their path in the working directory.
            preload: Source code to run before the first call, and again whenever the interpreter is
                replaced.
            wait_s: Seconds to wait for a free slot; None waits without limit.

        Raises:
            PoolFull: No slot became free within `wait_s`.
            ValueError: A name, an image or the preload is invalid.
            SandboxError: The host failed.
            BoxClosed: The pool was closed.
        """
        assert self._started, "open() on a pool that is not running"
        inputs = collect_inputs(images=images or {}, files=files or {}, limits=self.limits)
        slot = await self._acquire_slot(wait_s)
        self._next_box_id += 1
        group = self._control_groups.slots[slot] if self._control_groups else None
        box = Box(
            self._next_box_id,
            zygote=self._zygote,
            limits=self.limits,
            group=group,
            start_interpreter=self._start_interpreter,
            release_slot=self._release_slot,
        )
        self._boxes[box.id] = (box, slot, inputs, preload)
        try:
            await box.start()
        except BaseException:
            await box.close()
            raise
        return box

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _acquire_slot(self, wait_s: float | None) -> int:
        try:
            async with asyncio.timeout(wait_s):
                slot = self._free_slots.get_nowait() if self._free_slots.qsize() else await self._free_slots.get()
        except TimeoutError as full:
            raise PoolFull(f"all {self.size} boxes of the pool were in use for {wait_s:g} s") from full
        if slot == CLOSED_SLOT:
            self._free_slots.put_nowait(CLOSED_SLOT)  # wake the next waiter
            raise BoxClosed("the pool was closed")
        return slot

    async def _start_interpreter(self, box: Box) -> Interpreter:
        """Return a fresh interpreter that has loaded the inputs of the box and run its preload."""
        if self._fatal_error:
            raise SandboxError(self._fatal_error)
        _, slot, inputs, preload = self._boxes[box.id]
        life = self._opening_interpreters[slot] = await self._spare_or_new(slot)
        clock = box.make_timer(life, self.limits.open_timeout_s)
        box.reset_oom_counter()
        try:
            async with clock:
                listed = [{"name": item.name, "image": item.is_image, "variable": item.variable} for item in inputs]
                life.writer.write(frames.pack_frame({"inputs": listed, "preload": preload}, [item.content for item in inputs]))
                text, _ = await frames.read_frame(life.reader, max_bytes=0, max_blobs=0)
            answer = await frames.parse_json(text)
            if "bad" in answer:
                raise ValueError(str(answer["bad"]))
            if "host" in answer:
                raise SandboxError(str(answer["host"]))
        except BaseException as error:
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                await self._zygote.wait_for_exit(life)
            exit_ = await asyncio.shield(self._end_interpreter(life))
            if life.exceeded_limit is not None and isinstance(error, Exception):
                shown = fault_diagnosis.LIMIT_MESSAGES[life.exceeded_limit].format(limits=self.limits)
                raise ValueError(f"failed to open a box: {shown}; check preload and images") from error
            if isinstance(error, TimeoutError) and clock.was_starved:
                raise SandboxError(f"{fault_diagnosis.STARVED_MESSAGE}: the box was not opened in time") from error
            if isinstance(error, TimeoutError):
                raise ValueError(
                    f"opening the box took over {self.limits.open_timeout_s:g} s (BoxLimits.open_timeout_s): check preload and images"
                ) from error
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                raise _make_opening_error(*box.diagnose_death(life, exit_, channel_error="gone"), exit_.status) from error
            raise
        finally:
            del self._opening_interpreters[slot]
        return life

    async def _spare_or_new(self, slot: int) -> Interpreter:
        task = self._spare_interpreters.pop(slot, None)
        if task is not None:
            try:
                life = await asyncio.shield(task)
            except BaseException:  # cancelled: keep the spare process for the slot
                self._spare_interpreters[slot] = task
                raise
            if life is not None and not life.exit_future.done():
                return life
            if life is not None:
                life.close()
        async with self._start_lock:
            if not self._zygote.is_alive:
                await self._zygote.stop()
                await self._zygote.start()
        return await self._spawn_interpreter(slot)

    async def _spawn_interpreter(self, slot: int) -> Interpreter:
        """Fork an interpreter that waits for inputs, and move it to the slot's control group.

        Raises:
            SandboxError: The zygote or the control group failed.
        """
        life = await self._zygote.spawn_interpreter(slot)
        try:
            if self._control_groups:
                self._control_groups.slots[slot].add_process(life.pid)
        except OSError as error:
            await self._end_interpreter(life)
            raise SandboxError(f"cgroup: {error}") from error
        return life

    def _prefork(self, slot: int) -> None:
        """Fork a process for a free slot in advance, because forking is the slow part of `open`."""

        async def spare() -> Interpreter | None:
            try:
                return await self._spawn_interpreter(slot)
            except SandboxError:  # the next `open` retries and reports the error
                return None

        self._spare_interpreters[slot] = asyncio.create_task(spare())

    async def _end_interpreter(self, interpreter: Interpreter) -> ExitStatus:
        exit_ = await self._zygote.end_interpreter(interpreter)
        interpreter.close()
        return exit_

    async def _release_slot(self, box: Box) -> None:
        _, slot, *_ = self._boxes.pop(box.id)
        if self._started and slot not in self._spare_interpreters:
            self._prefork(slot)
        self._free_slots.put_nowait(slot)

    def _remove_groups(self) -> None:
        if self._control_groups is not None:
            self._control_groups.close()

    def _running_interpreters(self) -> list[Interpreter]:
        return [
            life
            for life in (*self._opening_interpreters.values(), *(box.interpreter for box, *_ in self._boxes.values()))
            if life is not None
        ]

    def _on_watchdog_failure(self, error: BaseException) -> None:
        """Kill all boxes, report host faults for their calls, and refuse to open new boxes.

        Without the watchdog, nothing enforces the limits of the boxes.
        """
        self._fatal_error = f"the watchdog failed: {error!r}"
        self._zygote.kill_zygote()


def _raise_file_limit(size: int) -> None:
    """Raise the soft limit on open files, so that `size` more boxes can be open.

    Raises:
        SandboxError: The hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = psutil.Process().num_fds() + DESCRIPTORS_PER_BOX * size + EXTRA_DESCRIPTORS
    if needed > hard:
        raise SandboxError(f"size={size}: the pool needs {needed} open files, but ulimit -Hn is {hard}: raise the limit or use fewer boxes")
    if needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _make_opening_error(fault: Fault, _: str | None, error: CallError, status: int | None) -> Exception:
    """Return the error for a box that died while it was being opened.

    The error is a SandboxError if the host is at fault, else a ValueError (bad preload or image).
    """
    if fault is Fault.HOST or status is None:
        return SandboxError(f"while opening a box: {error.message}")
    return ValueError(f"the box died while opening (exit {os.waitstatus_to_exitcode(status)}): check preload and images")
