"""Tests the watchdog and the pool's connection to its zygote if what they depend on fails. No box
runs: measurements and zygote are stand-ins."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl_sandbox import BoxLimits, Layers, SandboxError, SandboxPool, resource_usage, watchdog
from megatron_rl_sandbox.watchdog import ResourceWatchdog
from megatron_rl_sandbox.zygote_manager import ExitStatus, ZygoteManager


def life(number: int) -> Any:
    return SimpleNamespace(pid=number, exceeded_limit=None, exit_future=asyncio.get_running_loop().create_future())


def watched(monkeypatch: pytest.MonkeyPatch, *, outgrown: set[int], rounds: list[Exception | int]) -> tuple[list[int], list[BaseException]]:
    """Return those of the boxes 1 and 2 that were taken down, in the order in which that began, and
    the errors that ended the watchdog. Box 1 never ends."""
    monkeypatch.setattr(watchdog, "POLL_S", 0.001)
    began: list[int] = []
    lost: list[BaseException] = []

    def unreclaimable() -> int:
        told = rounds.pop(0) if len(rounds) > 1 else rounds[0]
        if isinstance(told, Exception):
            raise told
        return told

    async def end(one: Any) -> ExitStatus:
        began.append(one.pid)
        outgrown.add(2)  # once the end of box 1 has begun
        await asyncio.sleep(60 if one.pid == 1 else 0)
        return ExitStatus(None, 0.0)

    monkeypatch.setattr(resource_usage, "read_unreclaimable_bytes", unreclaimable)
    monkeypatch.setattr(resource_usage, "find_exceeded_limit", lambda pid, **_: "memory" if pid in outgrown else None)

    async def watch() -> None:
        lives = [life(1), life(2)]
        dog = ResourceWatchdog(
            SimpleNamespace(end_interpreter=end, shared_anonymous_bytes=0),
            list_interpreters=lambda: lives,
            limits=BoxLimits(),
            on_failure=lost.append,
        )
        await asyncio.sleep(0.2)
        for task in dog._kill_tasks:
            task.cancel()
        await dog.stop()

    asyncio.run(watch())
    return began, lost


def test_a_box_that_does_not_end_keeps_nobody_from_being_watched(monkeypatch: pytest.MonkeyPatch):
    """A box that does not end does not keep the watchdog from ending another one."""
    assert watched(monkeypatch, outgrown={1}, rounds=[0]) == ([1, 2], [])


def test_a_round_that_cannot_see_is_not_the_last(monkeypatch: pytest.MonkeyPatch):
    """A round whose measurement fails does not end the watchdog, whether it is the first round or a
    later one."""
    assert watched(monkeypatch, outgrown={1}, rounds=[OSError("first"), 0, OSError("later"), 0]) == ([1, 2], [])


def test_a_watchdog_that_ends_is_told(monkeypatch: pytest.MonkeyPatch):
    """An unexpected exception that ends the watchdog is passed to `on_failure`."""
    mistake = KeyError("SUnreclaim")
    assert watched(monkeypatch, outgrown={1}, rounds=[mistake]) == ([], [mistake])


def test_a_pool_without_its_watchdog_opens_no_box():
    async def calls() -> tuple[bool, str]:
        async with SandboxPool(size=1, isolation="none") as pool:
            await (await pool.open()).close()
            pool._on_watchdog_failure(KeyError("SUnreclaim"))
            with pytest.raises(SandboxError, match="the watchdog failed: KeyError"):
                await pool.open()
            return pool._zygote.is_alive, pool._fatal_error

    alive, trouble = asyncio.run(calls())
    assert not alive
    assert "SUnreclaim" in trouble


def test_a_zygote_that_reads_nothing_does_not_hold_the_loop_up():
    """A zygote whose socket is full is killed. Waiting to send the next message would block the
    event loop, and with it every box."""
    keeper = ZygoteManager(Layers(), BoxLimits())
    keeper._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper._control.settimeout(None)
    killed = []
    keeper._process = SimpleNamespace(kill=lambda: killed.append(True))
    keeper.is_alive = True

    def say() -> None:
        for number in range(100_000):
            keeper._send({"kill": number}, [])

    with keeper._control, theirs, pytest.raises(SandboxError, match="it is hung or was stopped"):
        say()
    assert (keeper.is_alive, killed) == (False, [True])
