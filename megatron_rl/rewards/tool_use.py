"""What can be said of an episode's tool calls and tags without asking anybody.

Counts follow DeepEyes (format 0 or -1, an image that came back) and CodeV (format 0 or 1).
"""

import re

from megatron_rl.data.answers import MAX_ANSWER_CHARS
from megatron_rl.rewards.answer import read_tagged
from megatron_rl.rewards.rubric import RewardInput

VIOLATION_REWARD = -1.0
_FENCE = re.compile(r"<code>|```python")


async def count_executed_code(reward_input: RewardInput) -> float:
    """Code turns that were executed, those included whose code raised. The same code again is no further turn."""
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
    """1 where at least one call brought a picture that the policy saw."""
    return float(any(turn.tool_call and turn.tool_call.ran and turn.images for turn in reward_input.turns))


async def deepeyes_format_reward(reward_input: RewardInput) -> float:
    """0, or -1 where thinking, vision or answer tags do not pair (the latter behind the last thinking), or the answer is over-long."""
    text = "\n".join(reward_input.replies)
    spoken = text.rpartition("</think>")[2]
    paired = (
        _are_tags_paired(text, "think") and _are_tags_paired(text, "|vision_start|", "|vision_end|") and _are_tags_paired(spoken, "answer")
    )
    return 0.0 if paired and len(read_tagged(spoken) or "") < MAX_ANSWER_CHARS else -1.0


async def codev_format_reward(reward_input: RewardInput) -> float:
    """1 where code, thinking, answer and vision tags pair, there is one answer, and no code comes after it; else 0.

    The released code also gives 1 to an episode that never answers; that pays for running out of turns, so one answer is asked for.
    """
    text = "\n".join(reward_input.replies)
    paired = all(_are_tags_paired(text, tag) for tag in ("code", "think", "answer")) and _are_tags_paired(
        text, "|vision_start|", "|vision_end|"
    )
    one = text.count("<answer>") == 1
    return float(paired and one and not _FENCE.search(text.partition("<answer>")[2]))


def step_violations(reward_input: RewardInput) -> list[bool]:
    """By turn: the call went wrong by the policy's doing (unreadable, a box off the picture, an exception), or repeats an earlier one."""
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
