"""The rubrics of tasks with questions (task.reward), with the constants of the systems they come from.

    accuracy   acc
    pyvision   acc + 0.1 for every executed code turn, where the answer is right
    deepeyes   0.8 acc + 0.2 format (0, -1) + 1.2 where a call brought an image and the answer is right;
               1.2 acc + 0.4 format for its mathematics
    codev      1.0 acc + 0.3 format + 0.5 process, one judgement of the whole episode by kind of question: as CodeV was released
    tapo       1.0 acc + 0.5 mean step reward, a judgement of each call (1, 0.25, 0; -1 for red lines): as CodeV's paper has it

The part `accuracy` is in all of them; an episode is solved where it is at least rubric.CORRECT. A void answer (answer.vetoes) leaves
nothing but penalties.
"""

import asyncio
from dataclasses import dataclass

from megatron_rl.config.checks import require, require_choice
from megatron_rl.rewards.accuracy import MATHS_SOURCES, Accuracy, source_of
from megatron_rl.rewards.algebra import Algebra
from megatron_rl.rewards.answer import strict_boxed, tagged, vetoes
from megatron_rl.rewards.judge import Judge
from megatron_rl.rewards.judge_prompt import load
from megatron_rl.rewards.rubric import Outcome, Part, Reward, Rubric, TurnPart
from megatron_rl.rewards.tool_use import RED_LINE, codev_format, deepeyes_format, executed_code, image_returned, red_lines

SEARCH_SOURCES = ("vstar", "chart", "high_res", "visual_search")
COUNTING_SOURCES = ("iconqa",)
"""CodeV's kinds of questions, by how a data source begins; all others are calculation."""
RESPONSE_LENGTH = 6000
"""Characters of an episode's replies, from their end, that the process judge reads."""
NUM_PROCESS_IMAGES = 3


REWARDS = ("accuracy", "pyvision", "deepeyes", "codev", "tapo")


def build(reward: str, *, judge: Judge | None, protocol: str) -> Rubric:
    """`protocol` tells how answers are written: PyVision's are boxed. Raises ValueError where a reward needs a judge and there is none."""
    require_choice("task.reward", reward, REWARDS)
    needs = f"task.reward={reward} is given by a judge; name the servers of one (or recorded verdicts, task.judge.cache)"
    require(judge is not None or reward not in ("codev", "tapo"), "task.judge.urls", [], needs)
    read = strict_boxed if protocol == "pyvision" else tagged
    accuracy = Accuracy(read, Algebra(), judge)
    parts = {"accuracy": Part(accuracy)}
    turn_parts: dict[str, TurnPart] = {}
    if reward == "pyvision":
        parts["code"] = Part(executed_code, weight=0.1, needs="accuracy")
    elif reward == "deepeyes":
        parts = deepeyes_parts(accuracy)
    elif judge is not None and reward == "codev":
        parts |= {"format": Part(codev_format, weight=0.3), "process": Part(Process(judge), weight=0.5)}
    elif judge is not None and reward == "tapo":
        turn_parts = {"evidence": TurnPart(Evidence(judge), weight=0.5)}
    return Rubric(parts=parts, turn_parts=turn_parts, vetoes=vetoes(read), solved_by="accuracy")


def deepeyes_parts(accuracy: Reward) -> dict[str, Part]:
    """0.8 acc + 0.2 format + 1.2 tool; for mathematics 0.4 acc + 0.2 format more, and no tool."""

    def for_maths(reward: Reward, *, wanted: bool = True) -> Reward:
        async def routed(outcome: Outcome) -> float:
            return await reward(outcome) if source_of(outcome).startswith(MATHS_SOURCES) == wanted else 0.0

        return routed

    return {
        "accuracy": Part(accuracy, weight=0.8),
        "format": Part(deepeyes_format, weight=0.2),
        "tool": Part(for_maths(image_returned, wanted=False), weight=1.2, needs="accuracy"),
        "maths_accuracy": Part(for_maths(accuracy), weight=0.4),
        "maths_format": Part(for_maths(deepeyes_format), weight=0.2),
    }


@dataclass(slots=True, frozen=True)
class Process:
    """CodeV's process reward in [0, 1]: the judge sees question, first image, replies (reasoning and code) and up to three images made."""

    judge: Judge

    async def __call__(self, outcome: Outcome) -> float:
        source = source_of(outcome)
        kind = "search" if source.startswith(SEARCH_SOURCES) else "counting" if source.startswith(COUNTING_SOURCES) else "calculation"
        if kind != "calculation" and not await executed_code(outcome):
            return 0.0  # a red flag of these two that needs no judge
        made = [image.pil for turn in outcome.turns for image in turn.images][:NUM_PROCESS_IMAGES]
        fields = {"question": str(outcome.payload["question"]), "response": "\n".join(outcome.replies)[-RESPONSE_LENGTH:]}
        shown = [*(image.pil for image in outcome.images[:1]), *made]
        return await self.judge.judged(outcome.rollout, load(f"process_{kind}"), fields=fields, images=shown)


@dataclass(slots=True, frozen=True)
class Evidence:
    """TAPO's step reward: -1 for a red line, 0 for a call without an image, else a judge's who knows neither the words nor the code."""

    judge: Judge

    async def __call__(self, outcome: Outcome) -> list[float | None]:
        crossed = red_lines(outcome)
        return await asyncio.gather(*(self._step(outcome, number, crossed=cross) for number, cross in enumerate(crossed)))

    async def _step(self, outcome: Outcome, number: int, *, crossed: bool) -> float | None:
        turn = outcome.turns[number]
        if turn.tool_call is None:
            return None
        if crossed:
            return RED_LINE
        if not turn.images:
            return 0.0
        sizes = ", ".join(f"{width} x {height}" for width, height in (image.pil.size for image in turn.images))
        fields = {
            "question": str(outcome.payload["question"]),
            "metadata": f"{turn.tool_call.tool}; pictures that came back: {len(turn.images)}, of {sizes} pixels",
        }
        pictures = [image.pil for image in (*outcome.images[:1], *turn.images)]
        return await self.judge.judged(outcome.rollout, load("step_evidence"), fields=fields, images=pictures, turn=number)
