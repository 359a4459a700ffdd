"""Steps that were recorded, as the training loop reads them again."""

from pathlib import Path

from megatron_rl.distributed.world import read_world
from megatron_rl.observe.recorder import save_images
from megatron_rl.observe.rollout_store import step_path, write_step
from megatron_rl.rollout.replay import Replay
from megatron_rl.rollout.scheduler import GenerationSettings
from megatron_rl.types import Rollout
from tests.observe.test_recorder import rollout
from tests.support.one_process import world_of_one
from tests.support.scripted_fleet import EPISODE, said


def test_a_replayed_step_counts_the_rounds_that_it_was_dealt(tmp_path: Path) -> None:
    """Steps of one, three and two rounds; a step's rollouts are those that were recorded, and are handed to `enough` whole."""
    played = {step: [rollout(sample + 10 * step, float(sample)) for sample in range(num)] for step, num in enumerate((2, 6, 4))}
    for step, rollouts in played.items():
        save_images(tmp_path, rollouts)
        write_step(step_path(tmp_path, step), rollouts, step=step, num_gen_batches=(1, 3, 2)[step])
    handed: list[list[Rollout]] = []
    rounds = GenerationSettings(num_prompts=2, group_size=1, max_rounds=9)
    with world_of_one():
        replay = Replay(tmp_path, world=read_world(), gather=list, rounds=rounds, episode=EPISODE)
        for step, so_far in enumerate((1, 4, 6)):
            taken = replay.generate(step, enough=handed.append)
            assert replay.admission.rounds == so_far
            assert handed[-1] is taken and said(taken) == said(played[step])
