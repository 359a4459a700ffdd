"""Responses of a teacher in contexts of rollouts, by a scripted engine."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import DistillSettings, MergeSettings, ModelSettings, RunSettings, Settings
from megatron_rl.errors import GracefulStop, PermanentInfraError, RunFailed
from megatron_rl.rollout.load_balancer import EngineRank
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.teacher_responses import choose_turns, generate_responses, sequences_with_loss
from megatron_rl.training_loop import respond_as_teacher
from megatron_rl.types import Rollout, Status
from tests.support.scripted_rollout_manager import EPISODE, DelayedEngine, ScriptedEngine, make_rollout_manager

STEP = 3
PLAYED = 12
"""Number of turns in a step of two groups of three episodes with two turns each."""


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model)))


def play(renderer: Renderer, engine: ScriptedEngine | None = None, **changes: object) -> tuple:
    """Return a manager without an action in its responses, and the rollouts of a step."""
    manager = make_rollout_manager(renderer, engine, **changes)
    manager.task.find_action = lambda text: None
    rollouts = manager.generate(STEP, is_enough=lambda _: True)
    manager.engine.requests.clear()
    return manager, rollouts


def test_a_fraction_of_the_trained_turns_is_chosen(renderer: Renderer) -> None:
    """Turns of failed and filtered rollouts, and turns without a loss, are left out. The choice
    depends on the seed, and smaller fractions are subsets."""
    _, rollouts = play(renderer)
    assert choose_turns(rollouts, fraction=1.0, seed=1) == {index: [0, 1] for index in range(6)}
    rollouts[1].status, rollouts[2].filter_reason = Status.FAILED, "no_peer"
    rollouts[4].sequences[0].exclude_from_loss(*rollouts[4].turns[0].token_span)
    left = {(0, 0), (0, 1), (3, 0), (3, 1), (4, 1), (5, 0), (5, 1)}

    def chosen(fraction: float, seed: int) -> set[tuple[int, int]]:
        return {(index, turn) for index, turns in choose_turns(rollouts, fraction=fraction, seed=seed).items() for turn in turns}

    assert chosen(1.0, 1) == left
    assert len(chosen(0.5, 1)) == 4 and chosen(0.3, 1) < chosen(0.5, 1) < left
    assert len({frozenset(chosen(0.5, seed)) for seed in range(9)}) > 4


def test_responses_continue_the_contexts_of_turns(renderer: Renderer) -> None:
    """Each response follows the tokens that the policy's turn followed, with the limits, the
    temperature and the stop strings of episodes and a seed of its own."""
    manager, rollouts = play(renderer)
    manager.task.stop = ("</end>",)
    own = set(manager.engine.attempts)
    responses = generate_responses(manager, rollouts, fraction=1.0, step=STEP)
    asked = manager.engine.requests
    assert {(each.max_tokens, each.temperature, each.stop) for each in asked} == {
        (EPISODE.max_new_tokens, EPISODE.temperature, ("</end>",))
    }
    assert len({each.seed for each in asked}) == PLAYED and not own & {each.seed for each in asked}
    assert [(each.group, each.sample_index, each.reward) for each in responses] == [(r.group, r.sample_index, None) for r in rollouts]
    for rollout, response in zip(rollouts, responses, strict=True):
        for turn, sequence in zip(rollout.turns, response.sequences, strict=True):
            start, whole = turn.token_span[0], rollout.sequences[turn.sequence]
            assert sequence.token_ids[:start] == whole.token_ids[:start]
            assert sequence.loss_mask == [0] * start + [1] * EPISODE.max_new_tokens
    again = generate_responses(manager, rollouts, fraction=1.0, step=STEP)
    other = generate_responses(manager, rollouts, fraction=1.0, step=STEP + 1)
    assert again == responses != other


@pytest.mark.parametrize(("action", "num"), [(0, 0), (1, 1), (2, 2), (None, EPISODE.max_new_tokens)])
def test_only_thoughts_have_a_loss(renderer: Renderer, action: int | None, num: int) -> None:
    """The tokens of the scripted engine have one character each. Responses without thoughts are
    left out."""
    manager, rollouts = play(renderer)
    manager.task.find_action = lambda text: action
    sequences = sequences_with_loss(generate_responses(manager, rollouts, fraction=1.0, step=STEP))
    assert [sum(each.loss_mask) for each in sequences] == [num] * (PLAYED if num else 0)
    for sequence in sequences:
        assert sequence.loss_mask[-EPISODE.max_new_tokens :] == [1] * num + [0] * (EPISODE.max_new_tokens - num)


def test_a_response_fits_the_rest_of_the_context(renderer: Renderer) -> None:
    _, rollouts = play(renderer)
    longest = max(turn.token_span[0] for rollout in rollouts for turn in rollout.turns)
    manager, _ = play(renderer)
    manager.episode_settings = replace(EPISODE, max_sequence_tokens=longest + 1)
    responses = generate_responses(manager, rollouts, fraction=1.0, step=STEP)
    assert max(len(sequence.token_ids) for each in responses for sequence in each.sequences) == longest + 1


def test_each_engine_has_its_own_rollouts_and_a_limit_of_requests(renderer: Renderer) -> None:
    """The first of two engines responds in the rollouts of even groups, two requests at a time."""
    engine, gathered = DelayedEngine(reply_s=0.001), []

    def gather(mine: list[Rollout] | None) -> list[Rollout]:
        gathered.append(mine)
        return mine or []

    collectives = {"gather_rollouts": gather, "is_local": lambda rollout: rollout.group % 2 == 0}
    manager, rollouts = play(renderer, engine, engine_rank=EngineRank(max_episodes=2), **collectives)
    engine.max_in_flight = 0
    with pytest.raises(GracefulStop):  # the other engine's responses are missing
        generate_responses(manager, rollouts, fraction=1.0, step=STEP)
    assert {rollout.group % 2 for rollout in gathered[-1]} == {0} and len(gathered[-1]) == 3
    assert engine.max_in_flight == 2


def make_settings(**changes: object) -> Settings:
    distill = DistillSettings(merge=MergeSettings(method="mean"), apply_to="responses", **changes)
    return Settings(model=ModelSettings(path="m"), run=RunSettings(dir="there"), distill=distill)


class Merged:
    """A policy with a merge of checkpoints."""

    def teacher_weights(self) -> object:
        yield "merged", None


def test_the_engine_has_the_teachers_weights_until_the_next_sync(renderer: Renderer) -> None:
    """The weights of the merge are sent before the responses. The next rollouts wait until the
    trainer has taken the device and sent the policy's weights."""
    manager, rollouts = play(renderer)
    manager.engine.log.clear()
    sequences = respond_as_teacher(rollouts, make_settings(response_fraction=0.5), Merged(), manager, step=STEP)
    assert len(sequences) == len(manager.engine.requests) == PLAYED // 2
    assert manager.engine.log == ["engine sleeps", "trainer wakes", f"engine loads merged as {STEP}", "trainer sleeps", "engine wakes"]
    with manager.offloaded(), pytest.raises(AssertionError, match="call update_weights before generating"):
        manager.generate(STEP + 1, is_enough=lambda _: True)
    manager.update_weights(iter([("policy", None)]), version=STEP + 1)
    assert len(manager.generate(STEP + 1, is_enough=lambda _: True)) == 6
    without = Settings(model=ModelSettings(path="m"), run=RunSettings(dir="there"))
    assert respond_as_teacher(rollouts, without, Merged(), manager, step=STEP) == []


def test_an_engine_that_fails_ends_the_run(renderer: Renderer) -> None:
    """A failure is never a reward: one line names its reason."""
    manager, rollouts = play(renderer)
    manager.engine.num_faults, manager.engine.fault_type = 1, PermanentInfraError
    failed = generate_responses(manager, rollouts, fraction=1.0, step=STEP)
    assert {(each.status, each.reward) for each in failed} == {(Status.FAILED, None)}
    manager.engine.attempts.clear()
    with pytest.raises(RunFailed, match="6 of 6 rollouts failed.*the engine is down"):
        respond_as_teacher(rollouts, make_settings(), Merged(), manager, step=STEP)
