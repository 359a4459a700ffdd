"""Rubrics for tasks with questions (task.reward), with the constants of the published systems.

    accuracy   acc
    pyvision   acc + 0.1 for every turn with executed code, if the answer is right
    deepeyes   0.8 acc + 0.2 format (0, -1) + 1.2 if a call returned an image and the answer is
               right; 1.2 acc + 0.4 format for mathematical data sources
    codev      1.0 acc + 0.3 format + 0.5 process, as in CodeV's released code: one verdict on the
               whole episode, with a prompt for the kind of question
    tapo       1.0 acc + 0.5 mean step reward, as in CodeV's paper: a verdict on each call (1,
               0.25, 0; -1 for violations)

Every rubric contains the term `accuracy`; an episode is solved if this term reaches
rubric.CORRECT_THRESHOLD. If the answer is vetoed (answer.make_answer_vetoes), only penalties
remain.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from PIL.Image import Image as Picture

from megatron_rl.config.checks import require, require_choice
from megatron_rl.rewards.accuracy import MATHS_SOURCES, AccuracyReward, get_data_source
from megatron_rl.rewards.algebra import MathVerifier
from megatron_rl.rewards.answer import make_answer_vetoes, read_strict_boxed, read_tagged
from megatron_rl.rewards.judge import Judge
from megatron_rl.rewards.judge_prompt import load_judge_prompt
from megatron_rl.rewards.rubric import RewardFn, RewardInput, RewardTerm, Rubric, TurnRewardTerm
from megatron_rl.rewards.tool_use import (
    VIOLATION_REWARD,
    codev_format_reward,
    count_executed_code,
    deepeyes_format_reward,
    image_returned_reward,
    step_violations,
)
from megatron_rl.types import Image

SEARCH_SOURCES = ("vstar", "chart", "high_res", "visual_search")
COUNTING_SOURCES = ("iconqa",)
"""Prefixes of the data sources with CodeV's counting questions; SEARCH_SOURCES lists the prefixes
for CodeV's search questions. All other sources count as calculation.
"""
MAX_RESPONSE_CHARS = 6000
"""Maximum number of characters of an episode's replies that the process judge reads; of longer
replies, only the end is kept.
"""
MAX_PROCESS_IMAGES = 3


REWARD_NAMES = ("accuracy", "pyvision", "deepeyes", "codev", "tapo")


def build_rubric(reward_name: str, *, judge: Judge | None, tool_format: str) -> Rubric:
    """Return the rubric for a value of task.reward.

    `tool_format` determines the answer format: boxed for pyvision, tagged otherwise.

    Raises:
        ValueError: The name is unknown, or the reward requires a judge and `judge` is None.
    """
    require_choice("task.reward", reward_name, REWARD_NAMES)
    needs = f"task.reward={reward_name} requires a judge; name its servers (or recorded verdicts, task.judge.cache)"
    require(judge is not None or reward_name not in ("codev", "tapo"), "task.judge.urls", [], needs)
    read = read_strict_boxed if tool_format == "pyvision" else read_tagged
    accuracy = AccuracyReward(read, MathVerifier(), judge)
    parts = {"accuracy": RewardTerm(accuracy)}
    turn_parts: dict[str, TurnRewardTerm] = {}
    if reward_name == "pyvision":
        parts["code"] = RewardTerm(count_executed_code, weight=0.1, requires="accuracy")
    elif reward_name == "deepeyes":
        parts = deepeyes_terms(accuracy)
    elif judge is not None and reward_name == "codev":
        parts |= {"format": RewardTerm(codev_format_reward, weight=0.3), "process": RewardTerm(ToolUseJudgeReward(judge), weight=0.5)}
    elif judge is not None and reward_name == "tapo":
        turn_parts = {"evidence": TurnRewardTerm(TapoStepReward(judge), weight=0.5)}
    return Rubric(terms=parts, turn_terms=turn_parts, vetoes=make_answer_vetoes(read), solved_term="accuracy")


def deepeyes_terms(accuracy: RewardFn) -> dict[str, RewardTerm]:
    """Return DeepEyes' terms: 0.8 acc + 0.2 format + 1.2 tool.

    For mathematical data sources, the tool term is 0, and two further terms add
    0.4 acc + 0.2 format. The sum is then 1.2 acc + 0.4 format. The two further terms are 0 for all
    other data sources.
    """

    def for_maths(reward: RewardFn, *, wanted: bool = True) -> RewardFn:
        async def routed(outcome: RewardInput) -> float | None:
            return await reward(outcome) if get_data_source(outcome.payload).startswith(MATHS_SOURCES) == wanted else 0.0

        return routed

    return {
        "accuracy": RewardTerm(accuracy, weight=0.8),
        "format": RewardTerm(deepeyes_format_reward, weight=0.2),
        "tool": RewardTerm(for_maths(image_returned_reward, wanted=False), weight=1.2, requires="accuracy"),
        "maths_accuracy": RewardTerm(for_maths(accuracy), weight=0.4),
        "maths_format": RewardTerm(for_maths(deepeyes_format_reward), weight=0.2),
    }


@dataclass(slots=True, frozen=True)
class ToolUseJudgeReward:
    """CodeV's process reward in [0, 1], from a judge's verdict on the whole episode.

    The judge receives the question, its first image, the replies (reasoning and code) and up to
    MAX_PROCESS_IMAGES generated images.
    """

    judge: Judge

    async def __call__(self, reward_input: RewardInput) -> float:
        """Return the verdict, or 0 for a search or counting question if no code was executed."""
        source = get_data_source(reward_input.payload)
        kind = "search" if source.startswith(SEARCH_SOURCES) else "counting" if source.startswith(COUNTING_SOURCES) else "calculation"
        if kind != "calculation" and not await count_executed_code(reward_input):
            return 0.0  # search and counting require executed code, so no judge is needed here
        made = [image for turn in reward_input.turns for image in turn.images][:MAX_PROCESS_IMAGES]
        fields = {"question": str(reward_input.payload["question"]), "response": "\n".join(reward_input.replies)[-MAX_RESPONSE_CHARS:]}
        shown = _get_pictures([*reward_input.prompt_images[:1], *made])
        return await self.judge.score_rollout(reward_input.rollout, load_judge_prompt(f"process_{kind}"), fields=fields, images=shown)


@dataclass(slots=True, frozen=True)
class TapoStepReward:
    """TAPO's step reward for each tool call.

    The reward is -1 for a violation and 0 for a call that returned no image. All other calls are
    scored by a judge, which receives neither the replies nor the code.
    """

    judge: Judge

    async def __call__(self, reward_input: RewardInput) -> list[float | None]:
        """Return the reward of each turn, or None for turns without a tool call."""
        crossed = step_violations(reward_input)
        return await asyncio.gather(*(self._score_turn(reward_input, number, is_violation=cross) for number, cross in enumerate(crossed)))

    async def _score_turn(self, reward_input: RewardInput, turn_index: int, *, is_violation: bool) -> float | None:
        turn = reward_input.turns[turn_index]
        if turn.tool_call is None:
            return None
        if is_violation:
            return VIOLATION_REWARD
        if not turn.images:
            return 0.0
        sizes = ", ".join(f"{picture.width} x {picture.height}" for picture in _get_pictures(turn.images))
        fields = {
            "question": str(reward_input.payload["question"]),
            "metadata": f"{turn.tool_call.tool}; pictures that came back: {len(turn.images)}, of {sizes} pixels",
        }
        pictures = _get_pictures([*reward_input.prompt_images[:1], *turn.images])
        return await self.judge.score_rollout(
            reward_input.rollout, load_judge_prompt("step_evidence"), fields=fields, images=pictures, turn=turn_index
        )


def _get_pictures(images: Sequence[Image]) -> list[Picture]:
    pictures = [image.pil for image in images if image.pil is not None]
    assert len(pictures) == len(images), "the images of an episode have pixels until it is scored"
    return pictures
