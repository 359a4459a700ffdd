"""Rewards for tool calls and tags, computed without a judge.

The rewards follow DeepEyes (format 0 or -1, and whether a call returned an image) and CodeV (format
0 or 1).
"""

import re

from megatron_rl.data.answers import MAX_ANSWER_CHARS
from megatron_rl.rewards.answer import read_tagged
from megatron_rl.rewards.rubric import RewardInput

VIOLATION_REWARD = -1.0
_FENCE = re.compile(r"<code>|```python")


async def count_executed_code(reward_input: RewardInput) -> float:
    """Return the number of turns with executed code, including code that raised an exception.

    Turns with identical code count once.
    """
    return float(
        len(
            {
                turn.tool_call.source
                for turn in reward_input.turns
                if turn.tool_call and turn.tool_call.ran and turn.tool_call.tool == "python"
            }
        )
    )


async def image_returned_reward(reward_input: RewardInput) -> float:
    """Return 1 if at least one tool call returned an image to the policy, else 0."""
    return float(any(turn.tool_call and turn.tool_call.ran and turn.images for turn in reward_input.turns))


async def deepeyes_format_reward(reward_input: RewardInput) -> float:
    """Return 0 for a valid format, else -1.

    Thinking tags, vision tags, and the answer tags after the last thinking block must be paired.
    The answer must be shorter than MAX_ANSWER_CHARS.
    """
    text = "\n".join(reward_input.replies)
    spoken = text.rpartition("</think>")[2]
    paired = (
        _are_tags_paired(text, "think") and _are_tags_paired(text, "|vision_start|", "|vision_end|") and _are_tags_paired(spoken, "answer")
    )
    return 0.0 if paired and len(read_tagged(spoken) or "") < MAX_ANSWER_CHARS else -1.0


async def codev_format_reward(reward_input: RewardInput) -> float:
    """Return 1 for a valid format, else 0.

    Code, thinking, answer and vision tags must be paired. The episode must contain exactly one
    answer, and no code after the answer. The released code of CodeV does not require an answer. It
    therefore returns 1 for an episode that ran out of turns.
    """
    text = "\n".join(reward_input.replies)
    paired = all(_are_tags_paired(text, tag) for tag in ("code", "think", "answer")) and _are_tags_paired(
        text, "|vision_start|", "|vision_end|"
    )
    one = text.count("<answer>") == 1
    return float(paired and one and not _FENCE.search(text.partition("<answer>")[2]))


def step_violations(reward_input: RewardInput) -> list[bool]:
    """Return a bool for each turn, True if its tool call failed or repeats an earlier call.

    Only failures caused by the policy count: calls that cannot be parsed, boxes outside of the
    image, and exceptions.
    """
    seen: set[tuple[str, str]] = set()
    crossed = []
    for turn in reward_input.turns:
        call = turn.tool_call
        crossed.append(call is not None and (bool(call.error) or not call.ran or (call.tool, call.source.strip()) in seen))
        if call is not None:
            seen.add((call.tool, call.source.strip()))
    return crossed


def _are_tags_paired(text: str, tag: str, closing: str = "") -> bool:
    return text.count(f"<{tag}>") == text.count(f"<{closing or '/' + tag}>")
