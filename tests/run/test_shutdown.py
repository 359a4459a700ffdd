"""Tests the effect of stop signals, the grace period of a rollout phase, and how the rollout
manager and SFT stop. Whole runs are in tests/e2e/test_stop.py.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl import sft
from megatron_rl.config import ModelSettings, Settings, SftSettings
from megatron_rl.errors import GracefulStop
from megatron_rl.observe.metrics import StepTimer
from megatron_rl.rollout.manager import MakeCoroutine
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.run.shutdown import SIGNALS, StopSignal
from megatron_rl.types import Rollout
from tests.support.scripted_rollout_manager import EPISODE, EXAMPLES, make_rollout_manager
from tests.support.single_process_policy import single_process_world


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_and_interrupts_nothing(number: int) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopSignal(grace_s=9) as stop:
        assert not stop.is_requested
        send(number)
        assert stop.is_requested
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_only_a_second_sigint_interrupts() -> None:
    with StopSignal(grace_s=9):
        send(signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_another_thread_hears_no_signals_and_changes_no_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter() -> None:
        with StopSignal(grace_s=9):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def test_ranks_agree() -> None:
    """With one rank; tests/e2e/test_stop.py has two."""
    with single_process_world(), StopSignal(grace_s=9) as stop:
        stop.check()
        send(signal.SIGUSR1)
        with pytest.raises(GracefulStop):
            stop.check()


@pytest.mark.parametrize(("asked", "passed_s", "expected"), [(False, 99, "played"), (True, 5, "played"), (True, 7, None)])
def test_a_play_may_take_its_grace(asked: bool, passed_s: float, expected: str | None) -> None:
    """The grace period is 6 s of the given clock. A rollout phase that exceeds it is cancelled and
    cleans up first.
    """
    now, closed = 100.0, []

    async def play() -> str:
        nonlocal now
        try:
            if asked:
                send(signal.SIGTERM)
            now += passed_s
            await asyncio.sleep(0.5)
            return "played"
        finally:
            closed.append(True)

    with StopSignal(grace_s=6, clock=lambda: now) as stop:
        assert asyncio.run(stop.run_with_grace(play)) == expected
    assert closed == [True]


@pytest.mark.parametrize(("passed_s", "expected"), [((4, 3), None), ((4, 1), "played")])
def test_the_grace_is_counted_from_the_first_signal(
    passed_s: tuple[float, float], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The grace period of 6 s counts from the first signal, whatever further signals a queue and a
    launcher send.
    """
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    now = 100.0

    async def play() -> str:
        nonlocal now
        for number, passed in zip((signal.SIGTERM, signal.SIGUSR1), passed_s, strict=True):
            send(number)
            now += passed
        await asyncio.sleep(0.5)
        return "played"

    with StopSignal(grace_s=6, clock=lambda: now) as stop:
        assert asyncio.run(stop.run_with_grace(play)) == expected


def test_what_a_play_raises_comes_out() -> None:
    async def play() -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        asyncio.run(StopSignal(grace_s=6).run_with_grace(play))


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model)))


async def give_up(play: MakeCoroutine) -> None:
    """Return without running the coroutine, as if the grace period had ended at once."""


def test_a_fleet_stops_where_one_engine_gave_up(renderer: Renderer) -> None:
    """All ranks see fewer episodes than were scheduled, and all stop. In the second case, the
    gather adds episodes of another engine, which has finished them within its grace period.
    """
    others: list[Rollout] = make_rollout_manager(renderer).run_examples(EXAMPLES[:2], num_samples=2, settings=EPISODE)
    gathers: list[Callable[[list[Rollout] | None], list[Rollout]]] = [lambda mine: mine or [], lambda mine: [*(mine or []), *others[:2]]]
    for gather in gathers:
        with pytest.raises(GracefulStop):
            make_rollout_manager(renderer, gather_rollouts=gather, run_with_grace=give_up).run_examples(
                EXAMPLES[:2], num_samples=2, settings=EPISODE
            )
    follower = make_rollout_manager(renderer, gather_rollouts=lambda mine: [*(mine or []), *others], run_with_grace=give_up)
    assert follower.run_examples(EXAMPLES[:2], num_samples=2, settings=EPISODE) == others


@dataclass
class Asked:
    """Stop signal on which all ranks agree at the `at`-th check."""

    at: int
    log: list[str] = field(default_factory=list)

    def check(self) -> None:
        self.log.append("check")
        if self.log.count("check") == self.at:
            raise GracefulStop


@pytest.mark.parametrize(("at", "num_steps"), [(1, 0), (3, 2)])
def test_a_warm_start_stops_between_steps(at: int, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFT stops before the first step, or after a step that is recorded and in its checkpoint."""
    stop = Asked(at)
    say: Callable[[str], Callable[..., dict]] = lambda word: lambda *_, **__: stop.log.append(word) or {}  # noqa: E731
    monkeypatch.setattr(sft, "RenderedDemonstrations", lambda *_: range(9))
    parts = {
        "task": SimpleNamespace(demonstrations=lambda *_, **__: []),
        "policy": SimpleNamespace(pack=lambda *_, **__: [], update=say("update"), load_image_patches=None),
        "renderer": None,
        "run": SimpleNamespace(
            step_timer=StepTimer(),
            first_step=0,
            dump_batches_on_error=lambda *_, **__: StepTimer()("keep"),
            record=say("record"),
            history=None,
            stops_early=False,
        ),
        "checkpoints": SimpleNamespace(restore=say("restore"), begin_step=say("begin"), finish_step=say("saved")),
    }
    with pytest.raises(GracefulStop):
        sft.train_sft(Settings(sft=SftSettings(splits=["a"], steps=[5], batch_size=1)), **parts, stop_signal=stop)
    assert stop.log == ["restore", "check", *["update", "begin", "record", "saved", "check"] * num_steps]
