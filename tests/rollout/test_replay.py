"""Tests that the training loop reads recorded steps back."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.distributed.world import read_world
from megatron_rl.observe.recorder import save_images
from megatron_rl.observe.rollout_store import step_path, write_step
from megatron_rl.rollout.replay import RolloutReplay
from megatron_rl.rollout.scheduler import GenerationSettings
from megatron_rl.types import Rollout, StopReason
from tests.observe.test_recorder import rollout
from tests.support.scripted_rollout_manager import EPISODE, strip_timings
from tests.support.single_process_policy import single_process_world


def test_a_replayed_step_counts_the_rounds_that_it_was_dealt(tmp_path: Path) -> None:
    """Replaying steps of one, three and two generation batches restores the number of batches after
    each step. The rollouts equal the recorded ones and are passed to `is_enough` all at once.
    """
    played = {step: [rollout(sample + 10 * step, float(sample)) for sample in range(num)] for step, num in enumerate((2, 6, 4))}
    for step, rollouts in played.items():
        save_images(tmp_path, rollouts)
        write_step(step_path(tmp_path, step), rollouts, step=step, num_gen_batches=(1, 3, 2)[step])
    handed: list[list[Rollout]] = []
    rounds = GenerationSettings(num_prompts=2, group_size=1, max_num_gen_batches=9)
    with single_process_world():
        replay = RolloutReplay(tmp_path, world=read_world(), gather_rollouts=list, generation_settings=rounds, episode_settings=EPISODE)
        for step, so_far in enumerate((1, 4, 6)):
            taken = replay.generate(step, is_enough=handed.append)
            assert replay.scheduler.num_generation_batches == so_far
            assert handed[-1] is taken and strip_timings(taken) == strip_timings(played[step])


@pytest.mark.parametrize("keeps_final_state", [False, True])
def test_truncated_episodes_without_a_final_state_are_named_once(
    keeps_final_state: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three recorded episodes were truncated by the environment, and one of these has no
    final state."""
    played = [replace(rollout(sample, 1.0), stop_reason=StopReason.ENV_TRUNCATED) for sample in range(2)] + [rollout(2, 1.0)]
    played[0].final_state = replace(played[0].sequences[0])
    for step in range(2):
        save_images(tmp_path, played)
        write_step(step_path(tmp_path, step), played, step=step, num_gen_batches=1)
    rounds, episodes = (
        GenerationSettings(num_prompts=1, group_size=3, max_num_gen_batches=9),
        replace(EPISODE, keeps_final_state=keeps_final_state),
    )
    with single_process_world():
        replay = RolloutReplay(tmp_path, world=read_world(), gather_rollouts=list, generation_settings=rounds, episode_settings=episodes)
        for step in range(2):
            replay.generate(step, is_enough=lambda _: True)
    shown = capsys.readouterr().err
    path = step_path(tmp_path, 0)
    told = f"warning: {path}: 1 truncated episodes have no final state, so the value after their end is 0; record with"
    assert shown == (f"{told} algo.bootstrap_truncated=true\n" if keeps_final_state else "")
