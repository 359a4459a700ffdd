"""launch/train.py with episodes that do not end while a certain file exists next to the run
directory. A second file reports that an episode waits.

- hold_train, hold_train_is_felt: episodes of training
- hold_eval, hold_eval_is_felt: episodes of evaluations

Everything else is unchanged, so that runs with and without the files can be compared.
"""

import asyncio
import runpy
import sys
from pathlib import Path

from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.scheduler import ScheduledGroup
from megatron_rl.rollout.work_buffer import WorkBuffer
from megatron_rl.types import Rollout

TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"
HOME = Path(next(word for word in sys.argv if word.startswith("run.dir=")).removeprefix("run.dir=")).parent
episode = RolloutManager._run_episode_with_retries


async def run_then_wait(self: RolloutManager, scheduled: ScheduledGroup, work_buffer: WorkBuffer, **given: object) -> Rollout:
    """Run the episode, then wait. The episode is complete when it is discarded."""
    kind = "hold_eval" if scheduled.settings.seed == self.episode_settings.at_step(-1).seed else "hold_train"
    rollout = await episode(self, scheduled, work_buffer, **given)
    while (HOME / kind).exists():
        (HOME / f"{kind}_is_felt").touch()
        await asyncio.sleep(0.02)
    return rollout


if __name__ == "__main__":
    RolloutManager._run_episode_with_retries = run_then_wait
    sys.argv[0] = str(TRAIN)
    runpy.run_path(str(TRAIN), run_name="__main__")
