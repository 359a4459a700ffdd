"""A user's own file with a task that the repository does not contain, multi-turn in one sequence,
and a run of this task.

    python custom_task.py MODEL_FOLDER RUN_FOLDER

test_own_task.py copies this file out of the repository and runs it there. megatron_rl knows nothing
of the task before `run` is called.
"""

import sys
from dataclasses import dataclass, field

from PIL import Image

from megatron_rl.config import (
    BatchSettings,
    EngineSettings,
    ModelSettings,
    OptimSettings,
    RolloutStoreSettings,
    RunSettings,
    Settings,
    TaskSettings,
)
from megatron_rl.entrypoints.train import run
from megatron_rl.registry import Plugins
from megatron_rl.rewards.rubric import RewardInput, RewardTerm, Rubric, TurnRewardTerm, environment_rewards
from megatron_rl.rollout.task import Env, Step, Task
from megatron_rl.types import Example, Message, Rollout

COLORS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}


async def vowel_fraction(outcome: RewardInput) -> float:
    """Return the fraction of vowels in all responses."""
    text = "".join(outcome.replies)
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def make_image_message(color: str, size: tuple[int, int], question: str) -> Message:
    picture = Image.new("RGB", size, COLORS[color])
    picture.paste((255, 255, 255), (0, 0, size[0] // 2, size[1] // 3))
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}


@dataclass
class TwoImageEnv(Env):
    """Returns an image, then a second image of another size in the same sequence, then a question
    without an image.
    """

    color: str
    replies: list[str] = field(default_factory=list)

    async def reset(self, seed: int) -> list[Message]:
        return [{"role": "system", "content": "You look twice."}, make_image_message(self.color, (112, 112), "What is this?")]

    async def step(self, text: str) -> Step:
        self.replies.append(text)
        reward = -len(text) / 100
        if len(self.replies) == 1:
            return Step(messages=[make_image_message("blue", (168, 84), "And this?")], reward=reward, done=False)
        if len(self.replies) == 2:
            return Step(messages=[{"role": "user", "content": "Are they alike?"}], reward=reward, done=False)
        return Step(messages=[], reward=reward, done=True, reason="asked thrice")

    async def close(self) -> None:
        self.replies.clear()


class TwoImageTask(Task):
    rubric = Rubric(
        terms={"vowels": RewardTerm(vowel_fraction)},
        turn_terms={"brevity": TurnRewardTerm(environment_rewards, weight=0.5, averages_turns=False)},
    )

    def examples(self, split: str) -> list[Example]:
        return [Example(id=color, payload={"color": color}) for color in (COLORS if split == "train" else ["green"])]

    def env(self, example: Example) -> TwoImageEnv:
        return TwoImageEnv(str(example.payload["color"]))

    def success(self, rollout: Rollout) -> bool:
        return rollout.reward > 0.5


if __name__ == "__main__":
    settings = Settings(
        model=ModelSettings(path=sys.argv[1], min_pixels=3136, max_pixels=20000),
        engine=EngineSettings(kv_cache_mib=16, max_model_len=512),
        optim=OptimSettings(lr=3e-3),
        batch=BatchSettings(prompts_per_step=3, group_size=4, minibatches=3),
        task=TaskSettings(name="mine", max_new_tokens=12, eval_samples=2),
        run=RunSettings(dir=sys.argv[2], steps=4),
        rollouts=RolloutStoreSettings(keep_best=12),
    )
    run(settings, Plugins(tasks={"mine": TwoImageTask}))
