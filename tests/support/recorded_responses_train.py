"""launch/train.py that writes the teacher's responses of each step to `responses_STEP.pickle` in the
run directory. Everything else is unchanged.
"""

import pickle
import runpy
import sys
from pathlib import Path

from megatron_rl import training_loop
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.types import Rollout

TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"
RUN = Path(next(word for word in sys.argv if word.startswith("run.dir=")).removeprefix("run.dir="))
generate = training_loop.generate_responses


def generate_and_write(manager: RolloutManager, rollouts: list[Rollout], *, fraction: float, step: int) -> list[Rollout]:
    responses = generate(manager, rollouts, fraction=fraction, step=step)
    if manager.engine_rank.index == 0:
        (RUN / f"responses_{step}.pickle").write_bytes(pickle.dumps(responses))
    return responses


if __name__ == "__main__":
    training_loop.generate_responses = generate_and_write
    sys.argv[0] = str(TRAIN)
    runpy.run_path(str(TRAIN), run_name="__main__")
