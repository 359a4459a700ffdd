"""The training loop with a real rollout manager whose episodes span weight updates, over several
attempts: which rollouts are trained on, and which are counted.

Engine, tools and networks are scripted.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl import training_loop
from megatron_rl.config import AlgoSettings, BatchSettings, CheckpointSettings, ModelSettings, RunSettings, Settings
from megatron_rl.distributed.image_exchange import ImageExchange
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.errors import GracefulStop
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.scheduler import choose_prompts
from megatron_rl.run.checkpoint_state import InputDigests
from megatron_rl.run.checkpoints import Checkpoints, find_checkpoint
from megatron_rl.run.record import Run
from tests.conftest import SUPPORT
from tests.support import fork_server
from tests.support.async_rollout_manager import BlockingTask, make_async_manager
from tests.support.scripted_rollout_manager import EPISODE, EXAMPLES
from tests.test_training_loop_scripted import Learner

STEPS = 6
DEALT = Counter(example.id for number in range(STEPS) for example in choose_prompts(EXAMPLES, 2, seed=EPISODE.seed, batch_index=number))


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    connect(read_world(), timeout_s=30)
    yield
    dist.destroy_process_group()


@dataclass
class SlowTask(BlockingTask):
    """The tools of two examples are slow: one needs about one or two steps, and the other needs
    longer, so that a step waits.
    """

    began: dict[tuple[str, int], float] = field(default_factory=dict)

    def is_blocked(self, name: str, number: int) -> bool:
        began = self.began.setdefault((name, number), time.monotonic())
        return time.monotonic() - began < {"4": 0.05, "3": 0.6}.get(name, 0.0)


class Slept(Learner):
    """A policy whose updates take a while, during which tools continue. SIGKILL ends the process in
    one step's update.
    """

    killed_in = -1

    def update(self, *given: object, step: int, **more: object) -> dict[str, float]:
        time.sleep(0.03)
        if step == self.killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return {name: value for name, value in super().update(*given, step=step, **more).items() if value is not None}


def live(
    settings: Settings, *, stopped_after: int | None = None, given_up_in: int | None = None, killed_in: tuple[str, int] = ("", -1)
) -> Run:  # fmt: skip
    """Run one attempt: to the end of the run, stopped after a step, stopped within a step whose
    rollouts were cancelled, or killed with SIGKILL during the rollouts, the update, the checkpoint
    (started but incomplete) or the weight sync of a step.
    """
    policy, (checkpoint, state) = Slept(), find_checkpoint(settings)
    run = Run(settings, read_world(), num_steps=STEPS, first_step=state.step, history=state.history)
    checkpoints = Checkpoints(settings, policy, resume_from=checkpoint, inputs=InputDigests())
    renderer = Renderer(settings.model)
    fleet = make_async_manager(renderer, max_staleness=settings.run.max_staleness, num_steps=STEPS)
    fleet.task = SlowTask()

    def check() -> None:
        if run.num_done == stopped_after:
            raise GracefulStop

    where, policy.killed_in = killed_in[0], killed_in[1] if killed_in[0] == "update" else -1

    async def within_grace(play: object) -> object:
        if (where, run.num_done) == ("rollouts", killed_in[1]):
            begun = asyncio.create_task(play())
            for _ in range(20):  # until turns are in progress
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGKILL)
            await begun
        if run.num_done != given_up_in:
            return await play()
        work = asyncio.create_task(play())
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return None

    def saved(folder: Path, **more: object) -> object:
        begun = save(folder, **more)
        if (where, folder.name) == ("checkpoint", f".step_{killed_in[1] + 1:08d}.partial"):
            os.kill(os.getpid(), signal.SIGKILL)
        return begun

    save, policy.save = policy.save, saved
    fleet.callbacks, serve = replace(fleet.callbacks, run_with_grace=within_grace), fleet.update_weights

    def served(tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        if (where, version) == ("sync", killed_in[1] + 1):
            os.kill(os.getpid(), signal.SIGKILL)
        serve(tensors, version=version)

    fleet.update_weights = served
    try:
        training_loop.train(
            run, policy=policy, rollout_manager=fleet, image_exchange=ImageExchange(patch_size=14), checkpoints=checkpoints,
            stop_signal=SimpleNamespace(check=check),
        )  # fmt: skip
    except GracefulStop:
        checkpoints.save(run.num_done, history=run.history, metrics=run.metrics)
    finally:
        run.close()
        fleet.close()
    assert fleet.task.opened == fleet.task.closed
    return run


def settings_of(folder: Path, model: Path, *, max_staleness: int) -> Settings:
    return Settings(
        model=ModelSettings(path=str(model)), algo=AlgoSettings(name="rloo"),
        batch=BatchSettings(prompts_per_step=2, group_size=3, micro_batch_tokens=400),
        run=RunSettings(dir=str(folder), steps=STEPS, max_staleness=max_staleness), checkpoint=CheckpointSettings(every=1),
    )  # fmt: skip


@pytest.mark.parametrize("ends", [{}, {"stopped_after": 1}, {"stopped_after": 4}, {"given_up_in": 2}])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_every_prompt_is_trained_on_once_in_whichever_life(
    max_staleness: int, ends: dict[str, int], random_model: Path, tmp_path: Path
) -> None:
    """Only prompts that were in flight when the run stopped are sampled again by the next attempt.
    No reward is lost, and none is counted twice.
    """
    settings = settings_of(tmp_path, random_model, max_staleness=max_staleness)
    if ends:
        first = live(settings, **ends)
        assert not first.is_finished and len(first.history.in_flight_prompts) == 2 * min(max_staleness, STEPS - first.num_done)
    run = live(settings)
    assert (run.num_done, run.history.num_generation_batches, run.history.in_flight_prompts) == (STEPS, STEPS, [])
    counted = {name: (episodes, rewards) for name, (episodes, rewards, _) in run.history.prompts.items()}
    assert counted == {name: (3 * num, 3.0 * num) for name, num in DEALT.items()}
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert max(line["rollout/staleness_max"] for line in lines) <= max_staleness
    assert lines[0]["rollout/staleness"] == 0 and (ends or sum(line["rollout/staleness"] for line in lines) > 0)
    for line in lines:
        assert line["rollout/stale_fraction"] == line["rollout/filtered_stale"] == 0, "whatever is due is waited for"
        assert 0 <= line["rollout/engine_idle_fraction"] <= 1 and 0 <= line["trainer/idle_fraction"] <= 1


@pytest.mark.parametrize(("where", "step"), [("rollouts", 2), ("update", 3), ("checkpoint", 2), ("sync", 2)])
def test_a_killed_run_counts_nothing_twice(where: str, step: int, random_model: Path, tmp_path: Path) -> None:
    """The run is killed by SIGKILL within a step while episodes are in progress. The next attempt
    resumes from the last complete checkpoint, and every prompt is counted exactly once.
    """
    killed = fork_server.run_script(SUPPORT / "killed_attempt.py", random_model, tmp_path, where, step, timeout_s=120)
    assert killed.returncode == -signal.SIGKILL and len(read_metrics(tmp_path / "metrics.jsonl")) == step, killed.stdout
    partial = [path.name for path in (tmp_path / "checkpoints").glob(".step_*")]
    assert partial == [".step_00000003.partial"] or where != "checkpoint"
    settings = settings_of(tmp_path, random_model, max_staleness=1)
    assert 0 < find_checkpoint(settings)[1].step <= step
    run = live(settings)
    assert (run.num_done, run.history.num_generation_batches, run.history.in_flight_prompts) == (STEPS, STEPS, [])
    counted = {name: (episodes, rewards) for name, (episodes, rewards, _) in run.history.prompts.items()}
    assert counted == {name: (3 * num, 3.0 * num) for name, num in DEALT.items()}
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(STEPS))


def test_a_synchronous_run_has_none_of_these_metrics(random_model: Path, tmp_path: Path) -> None:
    """With max_staleness=0, no metric of staleness, idle time or weight versions is logged."""
    run = live(settings_of(tmp_path, random_model, max_staleness=0))
    assert run.num_done == STEPS and run.history.in_flight_prompts == []
    names = {name for line in read_metrics(tmp_path / "metrics.jsonl") for name in line}
    assert not [name for name in names if "stale" in name or "idle" in name or name in ("rollout/versions", "rollout/on_policy_fraction")]
