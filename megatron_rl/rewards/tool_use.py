"""What can be said of an episode's tool calls and tags without asking anybody.

Counts follow DeepEyes (format 0 or -1, an image that came back) and CodeV (format 0 or 1).
"""

import re

from megatron_rl.data.answers import LONGEST_ANSWER
from megatron_rl.rewards.answer import tagged
from megatron_rl.rewards.rubric import Outcome

RED_LINE = -1.0
_FENCE = re.compile(r"<code>|```python")


async def executed_code(outcome: Outcome) -> float:
    """Code turns that were executed, those included whose code raised. The same code again is no further turn."""
    return float(
        len({turn.tool_call.source for turn in outcome.turns if turn.tool_call and turn.tool_call.ran and turn.tool_call.tool == "python"})
    )


async def image_returned(outcome: Outcome) -> float:
    """1 where at least one call brought a picture that the policy saw."""
    return float(any(turn.tool_call and turn.tool_call.ran and turn.images for turn in outcome.turns))


async def deepeyes_format(outcome: Outcome) -> float:
    """0, or -1 where thinking, vision or answer tags do not pair (the latter behind the last thinking), or the answer is over-long."""
    text = "\n".join(outcome.replies)
    spoken = text.rpartition("</think>")[2]
    paired = _paired(text, "think") and _paired(text, "|vision_start|", "|vision_end|") and _paired(spoken, "answer")
    return 0.0 if paired and len(tagged(spoken) or "") < LONGEST_ANSWER else -1.0


async def codev_format(outcome: Outcome) -> float:
    """1 where code, thinking, answer and vision tags pair, there is one answer, and no code comes after it; else 0.

    The released code also gives 1 to an episode that never answers; that pays for running out of turns, so one answer is asked for.
    """
    text = "\n".join(outcome.replies)
    paired = all(_paired(text, tag) for tag in ("code", "think", "answer")) and _paired(text, "|vision_start|", "|vision_end|")
    one = text.count("<answer>") == 1
    return float(paired and one and not _FENCE.search(text.partition("<answer>")[2]))


def red_lines(outcome: Outcome) -> list[bool]:
    """By turn: the call went wrong by the policy's doing (unreadable, a box off the picture, an exception), or repeats an earlier one."""
    seen: set[tuple[str, str]] = set()
    crossed = []
    for turn in outcome.turns:
        call = turn.tool_call
        crossed.append(call is not None and (bool(call.error) or not call.ran or (call.tool, call.source.strip()) in seen))
        if call is not None:
            seen.add((call.tool, call.source.strip()))
    return crossed


def _paired(text: str, tag: str, closing: str = "") -> bool:
    return text.count(f"<{tag}>") == text.count(f"<{closing or '/' + tag}>")
