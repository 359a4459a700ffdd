"""Records rollouts for CI and the results of training on them. A real engine generates the
episodes, and the rewards are made up.

    python tests/golden/record_rollouts.py play      # writes rollouts.jsonl and images/
    python tests/golden/record_rollouts.py expect    # writes expected.json

`play` generates the rollouts with vLLM and then runs `expect` in a new process. `expect` trains on
the recorded rollouts and records every number. Run `expect` alone after a change that is meant to
change numbers; the difference of expected.json is then part of the change. Run `play` after a
change of the rollout format or of the nano model; it changes the tokens and therefore all numbers.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_rl.config import EngineSettings, ModelSettings, TaskSettings  # noqa: E402 (the script's own tree comes first)
from megatron_rl.distributed.world import connect, read_world  # noqa: E402
from megatron_rl.observe.recorder import write_rollouts  # noqa: E402
from megatron_rl.rollout.colocated import ColocatedEngine  # noqa: E402
from megatron_rl.rollout.episode import EpisodeSettings  # noqa: E402
from megatron_rl.rollout.manager import RolloutManager  # noqa: E402
from megatron_rl.rollout.renderer import Renderer  # noqa: E402
from megatron_rl.rollout.scheduler import GenerationSettings  # noqa: E402
from megatron_rl.tasks.gym_cards.task import NumberLineTask  # noqa: E402
from megatron_rl.types import Rollout, Status, StopReason  # noqa: E402
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint  # noqa: E402
from tests.support.custom_task import TwoImageTask  # noqa: E402
from tests.support.golden_rollouts import CASES, GOLDEN, PIXELS, compute_golden_step  # noqa: E402
from tests.support.single_process_policy import single_process_world  # noqa: E402

HOW = EpisodeSettings(temperature=1.0, max_turns=2, max_new_tokens=16, max_sequence_tokens=512, max_images=4, seed=7)
STOP = ("s", "y")
"""Strings that end a turn. An untrained model rarely ends a turn itself, and turns of equal length
would hide errors in the normalization by length.
"""
EQUAL, FAILED = 1, (2, 2)
"""Group whose rewards are all equal, and rollout (group, sample index) that failed with an
infrastructure error.
"""


def make_model(folder: Path) -> Path:
    """Create the model of the fixture random_model."""
    make_checkpoint(folder / "random", preset="nano", init="random", seed=1)
    return folder / "random"


class Nobody:
    """Stands in for a trainer on the engine's device; there is none here."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


def play(model: Path) -> None:
    connect(read_world(), timeout_s=60)
    renderer = Renderer(ModelSettings(path=str(model), **PIXELS))
    engine = ColocatedEngine(
        str(model), EngineSettings(kv_cache_mib=16, max_model_len=512), special_tokens=renderer.special_tokens, group=None,
    )  # fmt: skip
    line, looks = NumberLineTask(TaskSettings(name="number_line")), TwoImageTask(TaskSettings(name="two_looks"))
    line.stop = looks.stop = STOP
    starts = [line.examples("train")[number] for number in (0, 7, 13)]
    rounds = GenerationSettings(num_prompts=3, group_size=3, max_num_gen_batches=1)
    fleets = [
        RolloutManager(task, engine=engine, renderer=renderer, trainer=Nobody(), episode_settings=HOW, generation_settings=rounds)
        for task in (line, looks)
    ]
    rollouts = fleets[0].run_examples(starts, num_samples=3, settings=HOW)
    twice = replace(HOW, max_turns=3)
    rollouts += fleets[1].run_examples(looks.examples("eval"), num_samples=3, settings=twice, first_group=len(starts))
    assert all(rollout.is_scored for rollout in rollouts), [rollout.reason for rollout in rollouts]
    draw = random.Random(0)
    for rollout in rollouts:
        reward(rollout, draw)
    shutil.rmtree(GOLDEN / "images", ignore_errors=True)
    write_rollouts(GOLDEN / "rollouts.jsonl", {"kept": rollouts}, step=0, step_rollouts=rollouts)
    engine.close()


def reward(rollout: Rollout, draw: random.Random) -> None:
    """Overwrite a rollout's rewards, step scores and reward deltas with made-up values that add up,
    because an untrained model earns the same reward everywhere.
    """
    rollout.wall_s = rollout.env_s = rollout.scoring_s = 0.0
    for turn in rollout.turns:
        turn.generation_s = turn.env_s = 0.0
    if (rollout.group, rollout.sample_index) == FAILED:
        rollout.status, rollout.stop_reason, rollout.reason, rollout.reward = (
            Status.FAILED,
            StopReason.INFRA_ERROR,
            "made up: no sandbox answered",
            None,
        )
        return
    for number, turn in enumerate(rollout.turns):
        is_equal = rollout.group == EQUAL
        turn.reward_delta = 0.0 if is_equal else round(draw.uniform(-1, 1), 3)
        turn.step_score = None if is_equal or number == 1 else round(draw.uniform(-1, 1), 3)
    rollout.outcome_reward = 1.0 if rollout.group == EQUAL else float(draw.randrange(3))
    rollout.reward = rollout.outcome_reward + sum(turn.reward_delta for turn in rollout.turns)
    rollout.reward_terms = {"made up": rollout.reward}


def expect(model: Path) -> None:
    numbers = {}
    for name, case in CASES.items():
        with single_process_world():
            numbers[name] = compute_golden_step(case.settings(model))
    (GOLDEN / "expected.json").write_text(json.dumps(numbers, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("play", "expect"))
    verb = parser.parse_args().verb
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        if verb == "expect":
            expect(model)
        else:
            play(model)
    if verb == "play":
        subprocess.run([sys.executable, __file__, "expect"], check=True)  # closing the engine has destroyed the process group


if __name__ == "__main__":
    main()
