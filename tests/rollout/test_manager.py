"""Tests the rollout manager with a scripted engine: prompts, engines, retries, outages and the
sharing of the device.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.errors import AccessDenied, InfraTimeout, PermanentInfraError, RunDenied
from megatron_rl.evaluation.in_run import evaluate_in_run
from megatron_rl.rollout import manager as fleet_module
from megatron_rl.rollout.load_balancer import EngineRank
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.scheduler import choose_prompts
from megatron_rl.types import Example, Rollout, Status, StopReason
from tests.support.scripted_rollout_manager import EPISODE, EXAMPLES, DelayedEngine, ScriptedEngine, make_rollout_manager, strip_timings


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model)))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of the manager's pauses, which take no time here."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(fleet_module.asyncio, "sleep", sleep)
    return made


def prompts(examples: list[Example], num: int, *, seed: int, rounds: Iterable[int]) -> list[str]:
    """Return the ids of the prompts of these generation batches, in order."""
    return [example.id for number in rounds for example in choose_prompts(examples, num, seed=seed, batch_index=number)]


def until(num_groups: int, seen: list[int] | None = None) -> Callable[[list[Rollout]], bool]:
    def enough(rollouts: list[Rollout]) -> bool:
        if seen is not None:
            seen.append(len(rollouts))
        return len({rollout.group for rollout in rollouts}) >= num_groups

    return enough


def test_every_epoch_has_its_own_order_of_all_examples() -> None:
    """With batches of 4 out of 10 examples, the third batch spans two epochs. The order differs
    between epochs and between seeds, and depends only on the seed and the batch index.
    """
    dealt = prompts(EXAMPLES, 4, seed=3, rounds=range(5))
    names = {example.id for example in EXAMPLES}
    first, second = dealt[:10], dealt[10:]
    assert len(dealt) == 20 and set(first) == set(second) == names
    assert len({tuple(first), tuple(second), tuple(sorted(names))}) == 3
    other = prompts(EXAMPLES, 4, seed=4, rounds=range(5))
    assert set(other[:10]) == names and other[:10] not in (first, second)
    assert prompts(EXAMPLES, 4, seed=3, rounds=[2]) == dealt[8:12], "no state but the round's number"


def test_examples_with_probabilities_are_drawn_with_them() -> None:
    """Each example's count in 4000 draws is within five standard deviations of its expectation. For
    probability 0.2, that is 126.
    """
    probabilities = (0.5, 0.3, 0.2)
    examples = [Example(f"{value}", {}, probability=value) for value in probabilities]
    rounds = [prompts(examples, 40, seed=1, rounds=[number]) for number in range(100)]
    counts = Counter(name for dealt in rounds for name in dealt)
    assert all(abs(counts[f"{value}"] - 4000 * value) < 5 * (4000 * value * (1 - value)) ** 0.5 for value in probabilities)
    assert len({tuple(dealt) for dealt in rounds}) == 100 and prompts(examples, 40, seed=1, rounds=[17]) == rounds[17]


def test_rounds_are_played_until_there_is_enough(renderer: Renderer) -> None:
    """A step generates batches until it has enough groups. The next step continues with the next
    batch, in the same attempt and in a resumed run.
    """
    fleet, seen = make_rollout_manager(renderer), []
    first = fleet.generate(0, is_enough=until(5, seen))
    assert seen == [6, 12, 18] and fleet.scheduler.num_generation_batches == 3, (
        "three rounds of two groups of three; each time all of them are shown"
    )
    second = fleet.generate(1, is_enough=until(1))
    assert fleet.scheduler.num_generation_batches == 4
    dealt = prompts(EXAMPLES, 2, seed=5, rounds=range(4))
    assert [rollout.example_id for rollout in first + second] == [name for name in dealt for _ in range(3)]
    assert [(rollout.group, rollout.sample_index) for rollout in first] == [(group, sample) for group in range(6) for sample in range(3)]
    assert {rollout.oldest_version for rollout in first} == {7}
    resumed = make_rollout_manager(renderer)
    resumed.scheduler.num_generation_batches = 3
    again = resumed.generate(1, is_enough=until(1))
    assert [(r.example_id, r.group, r.sample_index, r.sequences) for r in again] == [
        (r.example_id, r.group, r.sample_index, r.sequences) for r in second
    ]


def test_rounds_end_where_they_may_be_no_more(renderer: Renderer) -> None:
    fleet = make_rollout_manager(renderer, max_rounds=2)
    rollouts = fleet.generate(0, is_enough=lambda _: False)
    assert (len(rollouts), fleet.scheduler.num_generation_batches, {rollout.group for rollout in rollouts}) == (12, 2, {0, 1, 2, 3})


@pytest.mark.parametrize(("faults", "status", "tries"), [(0, Status.TRUNCATED, 1), (2, Status.TRUNCATED, 3), (3, Status.FAILED, 3)])
def test_an_episode_has_three_tries(renderer: Renderer, faults: int, status: Status, tries: int) -> None:
    engine = ScriptedEngine(num_faults=faults)
    rollouts = make_rollout_manager(renderer, engine).run_examples(EXAMPLES[:2], num_samples=3, settings=replace(EPISODE, max_turns=1))
    assert [rollout.status for rollout in rollouts] == [status] * 6
    assert sorted(engine.attempts.values()) == [tries] * 6, "each of the six asks with its own seed, and with the same one again"
    if status is Status.FAILED:
        assert {(rollout.reason, rollout.reward) for rollout in rollouts} == {("the engine is down", None)}
    else:
        assert all(len(rollout.turns) == len(rollout.sequences) == 1 for rollout in rollouts), "nothing is left of a try that failed"


def test_an_outage_that_ends_leaves_no_trace(renderer: Renderer, pauses: list[float]) -> None:
    """Each episode makes two requests, each fails 20 times, and the episode succeeds at its 41st
    try. The rollouts, environments and tokens equal those of a run without an outage.
    """
    told: list[str] = []
    fleet = make_rollout_manager(renderer, ScriptedEngine(num_faults=20), outage_timeout_s=600.0, log=told.append)
    unbroken = make_rollout_manager(renderer)
    for step in range(2):
        assert strip_timings(fleet.generate(step, is_enough=until(4))) == strip_timings(unbroken.generate(step, is_enough=until(4)))
        fleet.engine.num_faults = 0
    assert set(fleet.task.resets) == set(unbroken.task.resets)
    assert told[0] == "waiting: 6 of 6 rollouts failed (the engine is down); retrying in 1 s, for up to 600 s more (run.outage_timeout_s)"
    longer = [pause for pause in pauses if pause]
    assert longer[:6] == [1, 2, 4, 8, 16, 30] and set(longer[5:13]) == {30}, "14 times 3 tries"
    assert len(longer) == len(told) == 2 * 13, "the step has two rounds"


def test_an_outage_is_waited_for_as_long_as_patience_lasts(renderer: Renderer, pauses: list[float]) -> None:
    fleet = make_rollout_manager(renderer, ScriptedEngine(num_faults=10**6), outage_timeout_s=10.0, log=lambda _: None)
    rollouts = fleet.run_examples(EXAMPLES[:2], num_samples=3, settings=EPISODE)
    assert [pause for pause in pauses if pause] == [1, 2, 4, pytest.approx(3, abs=0.5)], "the tries' own seconds are none of the pauses"
    assert {rollout.status for rollout in rollouts} == {Status.FAILED} and len(rollouts) == 6


def test_an_evaluation_waits_too(renderer: Renderer, pauses: list[float]) -> None:
    task = TaskSettings(name="talk", max_turns=2, eval_samples=2)
    fleets = [
        make_rollout_manager(renderer, ScriptedEngine(num_faults=faults), outage_timeout_s=60.0, log=lambda _: None) for faults in (5, 0)
    ]
    broken, whole = (
        evaluate_in_run(fleet.task, Settings(task=task, run=RunSettings(dir="none")), rollout_manager=fleet) for fleet in fleets
    )
    assert broken == whole and whole["eval/greedy_return"] == 1.0 and [pause for pause in pauses if pause] == [1, 2, 4] * 2


def test_what_waiting_cannot_mend_is_not_waited_for(renderer: Renderer, pauses: list[float]) -> None:
    engine = ScriptedEngine(num_faults=1, fault_type=PermanentInfraError)
    fleet = make_rollout_manager(renderer, engine, outage_timeout_s=600.0)
    assert {rollout.stop_reason for rollout in fleet.run_examples(EXAMPLES[:2], num_samples=3, settings=EPISODE)} == {
        StopReason.PERMANENT_INFRA_ERROR
    }
    assert set(engine.attempts.values()) == {1} and not any(pauses)


def test_a_key_that_is_not_accepted_ends_the_run_at_once(renderer: Renderer, pauses: list[float]) -> None:
    """Nothing is retried or waited for, whatever run.max_failed_fraction is."""
    engine = ScriptedEngine(num_faults=10**6, fault_type=AccessDenied)
    fleet = make_rollout_manager(renderer, engine, outage_timeout_s=600.0)
    with pytest.raises(RunDenied, match=r"^the engine is down$"):
        fleet.run_examples(EXAMPLES[:2], num_samples=3, settings=EPISODE)
    assert set(engine.attempts.values()) == {1} and not any(pauses)


@pytest.mark.parametrize("step", [1, 0])
def test_what_was_done_before_a_key_was_refused_is_saved(step: int) -> None:
    """When a key is refused, the completed steps are saved and the run ends with an error that does
    not restart it, because the next attempt would meet the same error.
    """
    from megatron_rl.entrypoints.train import train_and_finalize  # imports Megatron

    saved: list[int] = []
    parts = SimpleNamespace(save_progress=lambda: saved.append(step), run=SimpleNamespace(num_done=step, first_step=0))

    def play() -> None:
        raise RunDenied("engine.urls=http://a: /weight_info: 401")

    with pytest.raises(RunDenied, match="401"):
        train_and_finalize(Settings(run=RunSettings(dir="none")), parts, play)
    assert saved == [step]


@pytest.mark.parametrize(("faults", "status"), [(10**6, Status.FAILED), (1, Status.TRUNCATED)])
def test_what_was_waited_for_is_waited_for_no_longer(renderer: Renderer, pauses: list[float], faults: int, status: Status) -> None:
    """After an InfraTimeout, no episode is tried three times and run.outage_timeout_s is not waited
    for again. All episodes are run once more at once, because the service may be back.
    """
    engine, told = ScriptedEngine(num_faults=faults, fault_type=InfraTimeout), []
    fleet = make_rollout_manager(renderer, engine, outage_timeout_s=600.0, log=told.append)
    rollouts = fleet.run_examples(EXAMPLES[:2], num_samples=3, settings=replace(EPISODE, max_turns=1))
    assert [rollout.status for rollout in rollouts] == [status] * 6 and len(rollouts) == 6
    assert set(engine.attempts.values()) == {2} and not any(pauses) and told == []
    if status is Status.FAILED:
        assert {rollout.stop_reason for rollout in rollouts} == {StopReason.INFRA_TIMEOUT}
    else:
        assert strip_timings(rollouts) == strip_timings(
            make_rollout_manager(renderer).run_examples(EXAMPLES[:2], num_samples=3, settings=replace(EPISODE, max_turns=1))
        )


def test_engines_wait_together(renderer: Renderer, pauses: list[float]) -> None:
    """One of two engines is down. The gathered rollouts are the same on both engines, so both wait
    equally long and retry only their own groups. Oracle: the rollouts of an engine without
    faults.
    """
    engines = [ScriptedEngine(), ScriptedEngine(num_faults=5)]
    rounds: list[list[Rollout]] = []
    whole = make_rollout_manager(renderer).run_examples(EXAMPLES[:4], num_samples=2, settings=EPISODE, first_group=3)

    def gather_of(index: int) -> Callable[[list[Rollout]], list[Rollout]]:
        calls = iter(range(99))

        def gather(mine: list[Rollout]) -> list[Rollout]:
            number = next(calls)
            if index == 1:
                rounds.append(mine)
                return mine + [rollout for rollout in whole if number == 0 and (rollout.group - 3) % 2 == 0]
            return mine + rounds[number]

        return gather

    played = {}
    for index in (1, 0):
        fleet = make_rollout_manager(
            renderer,
            engines[index],
            engine_rank=EngineRank(index=index, num_engines=2, max_episodes=99),
            gather_rollouts=gather_of(index),
            outage_timeout_s=60.0,
            log=lambda _: None,
        )
        played[index] = strip_timings(fleet.run_examples(EXAMPLES[:4], num_samples=2, settings=EPISODE, first_group=3))
    assert played[0] == played[1] == strip_timings(whole)
    assert [pause for pause in pauses if pause] == [1, 2, 4] * 2, "eleven tries; each engine has waited for the one that is down"
    assert [len(mine) for mine in rounds] == [4] * 4 and set(engines[0].attempts.values()) == {1}


def test_groups_are_dealt_whole_to_the_engines(renderer: Renderer) -> None:
    parts: list[list[Rollout]] = []
    for index in range(2):
        fleet = make_rollout_manager(
            renderer,
            engine_rank=EngineRank(index=index, num_engines=2, max_episodes=99),
            gather_rollouts=lambda mine: parts.append(mine) or mine * 3,
        )  # simulates a gather without missing groups
        fleet.run_examples(EXAMPLES[:5], num_samples=2, settings=EPISODE, first_group=10)
    groups = [[(rollout.group, rollout.sample_index, rollout.example_id) for rollout in part] for part in parts]
    assert groups[0] == [(10 + number, sample, f"{number}") for number in (0, 2, 4) for sample in range(2)]
    assert groups[1] == [(10 + number, sample, f"{number}") for number in (1, 3) for sample in range(2)]

    def follow(mine: list[Rollout] | None) -> list[Rollout]:
        assert mine is None
        return parts[1] + parts[0]

    follower = make_rollout_manager(
        renderer, ScriptedEngine(is_leader=False), engine_rank=EngineRank(num_engines=2, max_episodes=99), gather_rollouts=follow
    )
    together = follower.run_examples(EXAMPLES[:5], num_samples=2, settings=EPISODE)
    assert [(rollout.group, rollout.sample_index) for rollout in together] == [
        (10 + number, sample) for number in range(5) for sample in range(2)
    ]


def test_the_members_of_a_group_meet_the_same_world(renderer: Renderer) -> None:
    """The members of a group share one environment seed. Other groups, generation batches and steps
    have other seeds.
    """
    fleet, seeds = make_rollout_manager(renderer), set()
    for step in range(3):
        fleet.task.resets.clear()
        fleet.generate(step, is_enough=until(4))
        worlds = Counter(fleet.task.resets)
        assert len(worlds) == 4 and set(worlds.values()) == {3}
        seeds |= {seed for _, seed in worlds}
    assert len(seeds) == 12


@pytest.mark.known_failure("equal-seeds")
def test_every_request_has_its_own_seed(renderer: Renderer) -> None:
    """The seeds of 2 steps of 2 batches of 2 groups of 3 samples of 2 turns (48) are all different.
    They are equal in a second run with the same run seed, and disjoint from those of another run
    seed.
    """

    def seeds(run_seed: int) -> list[int]:
        engine = ScriptedEngine()
        fleet = make_rollout_manager(renderer, engine, episode_settings=replace(EPISODE, seed=run_seed))
        for step in range(2):
            fleet.generate(step, is_enough=until(4))
        assert {sampling.temperature for sampling in engine.requests} == {0.9}
        return [sampling.seed for sampling in engine.requests]

    assert len(seeds(5)) == len(set(seeds(5))) == 48
    assert seeds(5) == seeds(5) and not set(seeds(5)) & set(seeds(6))


def test_the_end_of_the_context_bounds_a_reply(renderer: Renderer) -> None:
    prompt = len(renderer.prompt([{"role": "user", "content": "0"}]).token_ids)
    engine = ScriptedEngine()
    settings = replace(EPISODE, max_new_tokens=50, max_sequence_tokens=prompt + 20)
    (rollout,) = make_rollout_manager(renderer, engine).run_examples(EXAMPLES[:1], num_samples=1, settings=settings)
    assert [sampling.max_tokens for sampling in engine.requests] == [20]
    assert (rollout.stop_reason, len(rollout.sequences[0].token_ids)) == (StopReason.MAX_TOKENS, prompt + 20)


def test_a_device_is_used_in_turn(renderer: Renderer) -> None:
    engine = ScriptedEngine()
    fleet, log = make_rollout_manager(renderer, engine), engine.log

    def weights(name: str) -> Iterator[tuple[str, torch.Tensor]]:
        assert log[-1] in ("trainer wakes", "update"), "they are read while the trainer is awake"
        yield name, torch.zeros(1)

    fleet.update_weights(weights("a"), version=0)
    assert log == ["engine sleeps", "trainer wakes", "engine loads a as 0", "trainer sleeps", "engine wakes"]
    fleet.generate(0, is_enough=until(1))
    log.clear()
    with fleet.offloaded():
        log.append("update")
    with pytest.raises(AssertionError, match="the trainer is using the device"):
        fleet.generate(1, is_enough=until(1))
    with fleet.offloaded():
        assert log == ["engine sleeps", "trainer wakes", "update"], "it is the trainer's already"
    fleet.update_weights(weights("b"), version=1)
    assert log[3:] == ["engine loads b as 1", "trainer sleeps", "engine wakes"]
    assert fleet.generate(1, is_enough=until(1)) and fleet.busy_s() == 1.5


def test_weights_that_do_not_arrive_are_not_served(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    fleet = make_rollout_manager(renderer, engine)

    def lose(tensors: object, *, version: int) -> None:
        raise RuntimeError("the engine does not hold what was sent")

    monkeypatch.setattr(engine, "load_weights", lose)
    with pytest.raises(RuntimeError, match="does not hold"):
        fleet.update_weights(iter([]), version=1)
    assert fleet.is_offloaded and engine.log == ["engine sleeps", "trainer wakes"]


def test_patience_counts_the_seconds_of_the_tries(renderer: Renderer, pauses: list[float]) -> None:
    """The outage timeout includes the duration of the tries. With a judge that hangs for 40 s
    before it fails, two tries with pauses, 40 + 1 and 40 + 2, and the remaining time fill 100 s.
    """

    def gather(mine: list[Rollout]) -> list[Rollout]:
        return [replace(rollout, wall_s=40.0) for rollout in mine]

    fleet = make_rollout_manager(
        renderer, ScriptedEngine(num_faults=10**6), outage_timeout_s=100.0, log=lambda _: None, gather_rollouts=gather
    )
    assert len(fleet.run_examples(EXAMPLES[:2], num_samples=3, settings=EPISODE)) == 6
    assert [pause for pause in pauses if pause] == [1, 2, 4]


def test_the_seconds_of_an_episode_are_those_of_all_its_tries(renderer: Renderer) -> None:
    """The duration of an episode, which counts toward run.outage_timeout_s, includes failed tries.
    Two tries fail after 0.1 s each; the third has a response of 0.1 s.
    """
    fleet = make_rollout_manager(renderer, DelayedEngine(num_faults=2, reply_s=0.1))
    (rollout,) = fleet.run_examples(EXAMPLES[:1], num_samples=1, settings=replace(EPISODE, max_turns=1))
    assert rollout.is_scored and 0.29 < rollout.wall_s < 5
