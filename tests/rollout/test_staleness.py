"""Tests episodes that continue across weight updates: which prompts are scheduled and rescheduled,
when a step has enough groups, and which groups are kept or dropped.
"""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_rl.config import ModelSettings
from megatron_rl.errors import GracefulStop
from megatron_rl.rollout.event_loop import PausableEventLoop
from megatron_rl.rollout.load_balancer import EngineRank
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.scheduler import GenerationSettings, PromptScheduler, choose_groups, choose_prompts
from megatron_rl.rollout.work_buffer import WorkBuffer
from megatron_rl.types import Rollout, Status, StopReason
from tests.support.async_rollout_manager import AsyncScriptedEngine, BlockingTask, make_async_manager, run_step, turn_versions
from tests.support.scripted_rollout_manager import EPISODE, EXAMPLES, make_rollout_manager, strip_timings


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model)))


def admission_of(*, max_staleness: int, num_steps: int | None = None) -> PromptScheduler:
    rounds = GenerationSettings(num_prompts=2, group_size=3, max_num_gen_batches=1, max_staleness=max_staleness, num_steps=num_steps)
    return PromptScheduler(lambda: EXAMPLES, settings=rounds, episode_settings=EPISODE)


def dealt_names(num: int) -> list[str]:
    return [example.id for number in range(num) for example in choose_prompts(EXAMPLES, 2, seed=EPISODE.seed, batch_index=number)]


def test_due_groups_are_trained_on_first() -> None:
    """Example by hand: groups 2 and 3 began a version later than group 4, for example because their
    engine was busy. A step of two groups takes 4, which is due, and the oldest of the others.
    """
    assert choose_groups([2, 3, 4, 5], {4}, num=2) == [2, 4]
    assert choose_groups([2, 3, 4, 5], {4, 5}, num=2) == [4, 5]
    assert choose_groups([2, 3, 4, 5], set(), num=3) == [2, 3, 4]


def test_capacity_by_hand() -> None:
    """Example by hand with batches of 2, a staleness of one version and 4 steps: 4 groups at first,
    then 2 more for every 2 that are finished, and none that no step would train on.
    """
    admission, names = admission_of(max_staleness=1, num_steps=4), dealt_names(4)
    new = admission.schedule(0)
    assert [(group, dealt.prompt_index, dealt.example.id) for group, dealt in new.items()] == [(n, n, names[n]) for n in range(4)]
    assert {dealt.settings for dealt in new.values()} == {EPISODE.at_step(0)} and admission.num_generation_batches == 2
    admission.finish([0, 3])
    assert admission.unfinished_prompt_indices == [1, 2]
    assert admission.drop_stale(1, {1: 0, 2: None}) == [] and admission.due_groups(1, {0: 0, 1: 0, 2: None}) == {1}, "0 is trained on"
    new = admission.schedule(1)
    assert [(group, dealt.prompt_index, dealt.settings) for group, dealt in new.items()] == [(n, n, EPISODE.at_step(1)) for n in (4, 5)]
    admission.finish([4, 5])
    assert admission.drop_stale(2, {1: 0, 2: None}) == [1], "2 has not begun"
    assert [(group, dealt.prompt_index) for group, dealt in admission.schedule(2).items()] == [(6, 1), (7, 6), (8, 7)], (
        "what is owed comes first"
    )
    admission.finish([2, 6])
    assert admission.drop_stale(3, {7: 2, 8: None}) == [] and admission.schedule(3) == {} and admission.num_generation_batches == 4


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_what_is_owed_outlives_a_second_stop(max_staleness: int) -> None:
    """Eight prompts were in progress when a run with max_staleness=3 was stopped. The resumed run
    allows less staleness, starts fewer prompts than are pending, and stops again: no pending prompt
    is lost. The same holds if the resumed run has started no prompt.
    """
    admission = admission_of(max_staleness=max_staleness)
    admission.num_generation_batches, admission.pending_prompt_indices = 4, list(range(8))
    assert admission.unfinished_prompt_indices == list(range(8))
    first, *others = admission.schedule(0)
    assert len(others) == 2 * max_staleness + 1 and admission.unfinished_prompt_indices == list(range(8))
    admission.finish([first])
    assert admission.unfinished_prompt_indices == list(range(1, 8))


@pytest.mark.known_failure("resume-skips-data")
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_killed_anywhere_every_prompt_is_trained_on_once(max_staleness: int) -> None:
    """Random groups finish first, random groups become stale, and the run is killed between random
    steps and resumes from its last state. Every prompt is trained on exactly once.
    """
    rng, num_steps = random.Random(max_staleness), 30
    for _ in range(20):
        admission, taken = admission_of(max_staleness=max_staleness, num_steps=num_steps), []
        for step in range(num_steps):
            if rng.random() < 0.2:
                state = (admission.num_generation_batches, admission.unfinished_prompt_indices)
                admission = admission_of(max_staleness=max_staleness, num_steps=num_steps)
                admission.num_generation_batches, admission.pending_prompt_indices = state
            oldest = {group: rng.choice([None, step, step - 1, step - 4]) for group in admission.active_groups}
            admission.drop_stale(step, oldest)
            admission.schedule(step)
            waiting = admission.active_groups
            assert 2 <= len(waiting) <= 2 * (max_staleness + 1) and len({dealt.prompt_index for dealt in waiting.values()}) == len(waiting)
            chosen = sorted(rng.sample(sorted(waiting), 2))
            taken += [waiting[group].prompt_index for group in chosen]
            admission.finish(chosen)
        assert sorted(taken) == list(range(2 * num_steps)) and admission.unfinished_prompt_indices == []
        assert max_staleness > 0 or taken == sorted(taken)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_epochs_count_what_was_trained_on(max_staleness: int) -> None:
    """Prompts in progress and pending prompts do not count."""
    planned = admission_of(max_staleness=max_staleness)
    assert planned.epoch == 0
    for step in range(4):
        planned.schedule(step)
        planned.finish(sorted(planned.active_groups)[:2])
        assert planned.epoch == pytest.approx(2 * (step + 1) / len(EXAMPLES))


def test_groups_go_to_the_engine_that_has_least() -> None:
    """Groups are assigned one by one to the engine with the fewest groups. With 3, 0 and 1 groups,
    the order is 1, 1, 2, 1, 2, and then all engines have 3.
    """
    hands = [EngineRank(index=index, num_engines=3).assign_by_load([10, 11, 12, 13, 14, 15], size=4, loads=[3, 0, 1]) for index in range(3)]
    assert [hand.own_groups for hand in hands] == [[15], [10, 11, 13], [12, 14]] and not any(hand.remaining for hand in hands)


def test_a_step_ends_with_enough_groups_and_the_others_go_on(renderer: Renderer) -> None:
    """One of 4 groups waits for a tool call of one of its members. The group finishes under the
    next weights and is trained on in the next step, together with a group that the first step
    finished but did not need. No prompt runs twice.
    """
    fleet, names = make_async_manager(renderer, max_staleness=1, num_steps=3), dealt_names(3)
    fleet.task.blocked = {names[0]: range(1, 2)}
    first = run_step(fleet, 0)
    assert [rollout.example_id for rollout in first] == [name for name in names[1:3] for _ in range(3)]
    assert fleet.scheduler.unfinished_prompt_indices == [0, 3] and fleet.num_stale == 0
    fleet.task.blocked = {name: range(3) for name in names[4:]}
    second = run_step(fleet, 1)
    assert [(r.example_id, r.group, r.sample_index) for r in second] == [(names[n], n, sample) for n in (0, 3) for sample in range(3)]
    assert [turn_versions(rollout) for rollout in second] == [[0, 0], [0, 1], [0, 0]] + [[0, 0]] * 3
    assert [rollout.oldest_version for rollout in second] == [0] * 6
    fleet.task.blocked.clear()
    third = run_step(fleet, 2)
    assert [rollout.example_id for rollout in third] == [name for name in names[4:] for _ in range(3)]
    assert [turn_versions(rollout) for rollout in third] == [[1, 2]] * 6, "the last step waits for all"
    assert fleet.scheduler.unfinished_prompt_indices == [] and set(fleet.task.opened.values()) == {3} == set(fleet.task.closed.values())
    rewards = [rollout.reward for rollout in first + second + third]
    assert rewards == [1.0] * 18, "the mean of two turns"


@pytest.mark.parametrize(("max_staleness", "last"), [(1, 1), (2, 2)])
def test_a_step_waits_for_what_the_next_one_could_not_train_on(max_staleness: int, last: int, renderer: Renderer) -> None:
    """A tool call is slow from step 0 on. Steps that may still wait train on other groups. The last
    step that may train on the delayed group waits for the group, although enough other groups are
    finished.
    """
    fleet, names = make_async_manager(renderer, max_staleness=max_staleness, num_steps=9), dealt_names(9)
    fleet.task.blocked = {names[1]: range(1)}
    for step in range(last):
        assert names[1] not in {rollout.example_id for rollout in run_step(fleet, step)}
    release = threading.Timer(0.5, fleet.task.blocked.clear)
    release.start()
    rollouts = run_step(fleet, last)
    release.join()
    assert [rollout.example_id for rollout in rollouts].count(names[1]) == 3 and len(rollouts) == 6
    assert [turn_versions(rollout) for rollout in rollouts if rollout.example_id == names[1]] == [[0, last], [0, 0], [0, 0]]
    assert fleet.num_stale == 0 and fleet.task.opened[names[1]] == 3


def test_what_grows_too_old_is_given_up_whole_and_dealt_again(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool call does not return in steps 0 and 1, and with `due_groups` disabled no step waits
    for its group. The group would be trained on two versions later, so it is dropped and its prompt
    runs again. The environments of the dropped group are closed.
    """
    fleet, names = make_async_manager(renderer, max_staleness=1, num_steps=4), dealt_names(4)
    monkeypatch.setattr(PromptScheduler, "due_groups", lambda self, step, oldest: set())
    fleet.task.blocked = {names[1]: range(3)}
    for step, stale in ((0, 0), (1, 0), (2, 3)):
        rollouts = run_step(fleet, step)
        assert fleet.num_stale == stale and all(step - rollout.oldest_version <= 1 for rollout in rollouts)
        assert len(rollouts) == 6 and (step == 2 or names[1] not in {rollout.example_id for rollout in rollouts})
    again = [rollout for rollout in run_step(fleet, 3) + rollouts if rollout.example_id == names[1]]
    assert len(again) == 3 and all(turn_versions(rollout) == [2, 2] for rollout in again), "three new episodes, which nobody held up"
    assert fleet.task.opened[names[1]] == fleet.task.closed[names[1]] == 6


def test_an_evaluation_lets_episodes_go_on(renderer: Renderer) -> None:
    fleet, names = make_async_manager(renderer, max_staleness=1, num_steps=2), dealt_names(2)
    fleet.task.blocked = {name: range(3) for name in names[2:]}
    run_step(fleet, 0)
    fleet.task.blocked.clear()
    fleet.update_weights(iter(()), version=1)
    evaluated = fleet.run_examples(EXAMPLES[:2], num_samples=9, settings=EPISODE)
    assert strip_timings(evaluated) == strip_timings(
        make_rollout_manager(renderer, AsyncScriptedEngine(weight_version=1)).run_examples(EXAMPLES[:2], num_samples=9, settings=EPISODE)
    )
    second = run_step(fleet, 1)
    assert [rollout.example_id for rollout in second] == [name for name in names[2:] for _ in range(3)]


def test_at_0_a_fleet_is_synchronous(renderer: Renderer) -> None:
    """With max_staleness=0, every step runs its own generation batch, even with slow tool calls.
    Oracle: the synchronous rollout manager.
    """
    fleet, plain = make_async_manager(renderer, max_staleness=0, num_steps=3), make_rollout_manager(renderer, AsyncScriptedEngine())
    fleet.task.blocked = {name: range(1) for name in dealt_names(1)}
    release = threading.Timer(0.2, fleet.task.blocked.clear)
    release.start()
    assert [strip_timings(run_step(fleet, step)) for step in range(3)] == [strip_timings(run_step(plain, step)) for step in range(3)]
    release.join()


def test_a_mistake_ends_what_is_under_way(renderer: Renderer) -> None:
    """An exception in an episode cancels all episodes in progress, including those that an earlier
    step has started.
    """
    fleet, names = make_async_manager(renderer, max_staleness=1, num_steps=4), dealt_names(2)
    fleet.task.blocked = {names[0]: range(3)}
    run_step(fleet, 0)

    def broken(name: str, number: int) -> bool:
        raise KeyError("a mistake")

    fleet.task.is_blocked = broken
    with pytest.raises(KeyError, match="a mistake"):
        run_step(fleet, 1)
    assert fleet.task.opened == fleet.task.closed


def test_a_fleet_closes_what_is_under_way(renderer: Renderer) -> None:
    fleet, names = make_async_manager(renderer, max_staleness=1, num_steps=4), dealt_names(2)
    fleet.task.blocked = {names[0]: range(3)}
    run_step(fleet, 0)
    assert fleet.task.closed[names[0]] == 0
    fleet.close()
    assert fleet.task.opened == fleet.task.closed and fleet.engine.log[-1] == "engine closes"


def test_what_is_down_is_waited_for(renderer: Renderer) -> None:
    """Each request fails 4 times, and an episode fails after 3 tries. A step runs its failed groups
    again; failed groups of a later step run again in that step. Without an outage timeout, the
    rollouts are FAILED.
    """
    fleet = make_async_manager(
        renderer, AsyncScriptedEngine(num_faults=4), max_staleness=1, num_steps=2, outage_timeout_s=9.0, log=lambda _: None
    )
    steps = [run_step(fleet, step) for step in range(2)]
    assert [rollout.example_id for each in steps for rollout in each] == [name for name in dealt_names(2) for _ in range(3)]
    assert all(rollout.is_scored for each in steps for rollout in each)
    down = make_async_manager(renderer, AsyncScriptedEngine(num_faults=99), max_staleness=1, num_steps=2)
    assert {(rollout.status, rollout.stop_reason) for rollout in run_step(down, 0)} == {(Status.FAILED, StopReason.INFRA_ERROR)}


def test_a_run_that_is_stopped_gives_up(renderer: Renderer) -> None:
    fleet, names = make_async_manager(renderer, max_staleness=1, num_steps=4), dealt_names(2)
    fleet.task.blocked = {name: range(3) for name in names}

    async def impatient(play: object) -> None:
        work = asyncio.create_task(play())
        await asyncio.sleep(0.1)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    fleet.callbacks = replace(fleet.callbacks, run_with_grace=impatient)
    with pytest.raises(GracefulStop):
        run_step(fleet, 0)
    assert fleet.task.opened == fleet.task.closed and sum(fleet.task.opened.values()) == 12


def steps_of(renderer: Renderer, tasks: Sequence[BlockingTask], *, num_steps: int, max_staleness: int) -> list[list[list[Rollout]]]:
    """Return, for each engine, the rollouts of each step, gathered from all engines."""
    store, meeting, handed = dist.HashStore(), threading.Barrier(len(tasks)), {}

    def play(index: int) -> list[list[Rollout]]:
        def everyones(mine: object) -> list:
            handed[index] = mine
            meeting.wait(60)
            theirs = [handed[other] for other in range(len(tasks))]
            meeting.wait(60)
            return theirs

        fleet = make_async_manager(
            renderer, max_staleness=max_staleness, num_steps=num_steps, all_gather=everyones,
            gather_rollouts=lambda mine: [rollout for part in everyones(mine) for rollout in part],
            engine_rank=EngineRank(index=index, num_engines=len(tasks), max_episodes=99, counter=store),
        )  # fmt: skip
        fleet.task = tasks[index]
        steps = []
        for step in range(num_steps):
            tasks[index].blocked = {} if step == max_staleness else tasks[index].blocked
            steps.append(run_step(fleet, step))
        return steps

    with ThreadPoolExecutor(len(tasks)) as threads:
        found = list(threads.map(play, range(len(tasks))))
    assert not any(store.check([f"{kind}/{number}"]) for kind in ("played", "groups") for number in range(1, 99)), "nothing is left"
    return found


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_engines_agree_on_what_is_enough(renderer: Renderer, max_staleness: int) -> None:
    """All tool calls on the second of two engines block in the first steps. Meanwhile the first
    engine runs its groups and receives new ones, until the second engine's groups are due. Every
    prompt is trained on once, in the same step on both engines.
    """
    tasks = [BlockingTask(), BlockingTask(blocked={example.id: range(99) for example in EXAMPLES})]
    steps, others = steps_of(renderer, tasks, num_steps=6, max_staleness=max_staleness)
    assert [strip_timings(step) for step in steps] == [strip_timings(step) for step in others]
    trained = Counter(rollout.example_id for step in steps for rollout in step)
    assert trained == Counter(name for name in dealt_names(6) for _ in range(3))
    for number, step in enumerate(steps):
        assert Counter(rollout.group for rollout in step) == {group: 3 for group in {rollout.group for rollout in step}}
        assert len(step) == 6 and all(0 <= number - rollout.oldest_version <= max_staleness for rollout in step)
    assert all(task.opened == task.closed for task in tasks) and len(tasks[0].opened) > len(tasks[1].opened)


def test_a_clock_stands_while_its_loop_does() -> None:
    """Timeouts exclude a pause of the loop. After a pause of 0.4 s, a result within the timeout of
    0.2 s is still received, and a missing result times out after 0.2 s of loop time.
    """
    with asyncio.Runner(loop_factory=PausableEventLoop) as runner:

        async def begin() -> tuple[asyncio.Task, asyncio.Task, float]:
            loop = asyncio.get_running_loop()
            answered, never = loop.create_future(), loop.create_future()
            tasks = [asyncio.create_task(asyncio.wait_for(each, 0.2)) for each in (answered, never)]
            loop.call_later(0.05, answered.set_result, "an answer")
            await asyncio.sleep(0)
            return *tasks, loop.time()

        async def end(tasks: Sequence[asyncio.Task]) -> tuple[list[object], float]:
            return await asyncio.gather(*tasks, return_exceptions=True), asyncio.get_running_loop().time()

        *tasks, began = runner.run(begin())
        time.sleep(0.4)
        (answer, late), ended = runner.run(end(tasks))
        assert answer == "an answer" and isinstance(late, TimeoutError) and 0.2 <= ended - began < 0.35


def test_a_group_is_as_old_as_its_oldest_episode() -> None:
    """Example by hand: members that started with versions 4, 2 and 3; a group with one started and
    one unstarted member; a group that has not started.
    """
    table = WorkBuffer()
    for (group, sample), version in {(0, 0): 4, (0, 1): 2, (0, 2): 3, (1, 0): None, (1, 1): 5, (2, 0): None}.items():
        table.conversations[group, sample] = SimpleNamespace(first_token_version=version)
    assert table.state(engine=0).oldest_versions == {0: 2, 1: 5, 2: None}
