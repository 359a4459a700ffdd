"""launch/train.py with a trainer that computes logprobs at 1.3 times the engine's temperature.

An optimizer step creates the file `updated` next to the run directory.
"""

import runpy
import sys
from pathlib import Path

from megatron_rl.policy import network
from megatron_rl.policy.policy import Policy

TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"
HOME = Path(next(word for word in sys.argv if word.startswith("run.dir=")).removeprefix("run.dir=")).parent
build, take_step = Policy.__init__, network.take_step


def init_with_wrong_temperature(self: Policy, *given: object, temperature: float, **more: object) -> None:
    build(self, *given, temperature=1.3 * temperature, **more)


def step_and_mark(optimizer: object) -> float:
    (HOME / "updated").touch()
    return take_step(optimizer)


if __name__ == "__main__":
    Policy.__init__, network.take_step = init_with_wrong_temperature, step_and_mark
    sys.argv[0] = str(TRAIN)
    runpy.run_path(str(TRAIN), run_name="__main__")
