"""Rules over the metrics of a run that find reward hacks and collapses (observe/alarms.py).

A rule compares medians over a window of steps. A metric that is missing or NaN is left out of a
window.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.types import ACCURACY_TERM

REWARD, HELD_OUT, R2 = "reward/mean", "eval/greedy_success", "reward_r2/"
HELD_OUT_MARGIN, HELD_OUT_SIGMAS, MAX_HELD_OUT_STEPS = 0.1, 3.0, 1000
"""Minimum drop of the success rate on held-out data, absolute and in standard errors of the
difference, and the number of steps in which to look for it.
"""
DOMINANT_R2, MINOR_R2 = 0.9, 0.3
"""A term dominates if its r2 is at least the first value, and that of each rival at most the
second.
"""
LENGTH_FACTOR, ENTROPY_GROWTH, ENTROPY_DROP, KL_GROWTH, MISMATCH_GROWTH = 1.5, 3.0, 5.0, 3.0, 3.0
MIN_JUDGE_DROP, MIN_TOOL_USE, TOOL_USE_DROP = 0.2, 0.1, 5.0
AGREEMENT, MIN_AGREEMENT_DROP, AGREEMENT_SIGMAS = "judge/agreement", 0.1, 4.0
"""Metric of the agreement between judge and rules, and its minimum drop, absolute and in standard
errors of the difference.
"""
COLLAPSED_FRACTION, MIXED_FRACTION = 0.9, 0.7
MIN_KL = {"policy/kl_ref": 0.5, "policy/ppo_kl": 0.1}
MIN_MISMATCH, MIN_DUPLICATES, DUPLICATES_RISE = 1e-3, 0.5, 0.3

Line = Mapping[str, float]
Rule = Callable[[Sequence[Line], int], str]
"""Returns what is wrong at the end of these steps, with the figures, or "".

The integer is the window.
"""


@dataclass(frozen=True, slots=True)
class Change:
    """Values of a metric in an early and a late window of steps."""

    name: str
    early: Sequence[float]
    late: Sequence[float]

    @property
    def before(self) -> float:
        """Median of the early window."""
        return statistics.median(self.early)

    @property
    def after(self) -> float:
        """Median of the late window."""
        return statistics.median(self.late)

    @property
    def rises(self) -> bool:
        """True if the windows differ by more than noise.

        Three quarters of the late values must exceed the early median, and three quarters of the
        early values must be below the late median.
        """
        early, late = sorted(self.early), sorted(self.late)
        return late[len(late) // 4] > self.before and early[-1 - len(early) // 4] < self.after

    @property
    def falls(self) -> bool:
        """True if the negated values rise."""
        return Change(self.name, [-value for value in self.early], [-value for value in self.late]).rises

    def __str__(self) -> str:
        return f"{self.name} {self.before:.4g} -> {self.after:.4g}"


def values_of(lines: Sequence[Line], name: str) -> list[float]:
    """Return the values of a metric, without steps that lack it and without NaN."""
    return [line[name] for line in lines if not math.isnan(line.get(name, math.nan))]


def change_of(name: str, lines: Sequence[Line], window: int) -> Change | None:
    """Compare the last window of these steps with the first.

    The result is None if the windows overlap, or if half of a window has no value.
    """
    early, late = values_of(lines[:window], name), values_of(lines[-window:], name)
    return Change(name, early, late) if len(lines) >= 2 * window and 2 * min(len(early), len(late)) >= window else None


def without_reward(change: Change | None, is_wrong: Callable[[Change], bool], lines: Sequence[Line], window: int) -> str:
    """Return the figures if a change is wrong and the reward did not rise in the same steps.

    The change must be as certain as a rise of the reward, which would else be noticed too late.
    """
    if change is None or not is_wrong(change) or not (change.rises or change.falls):
        return ""
    reward = change_of(REWARD, lines, window)
    return f"{change} without a rise of the reward ({reward})" if reward is not None and not reward.rises else ""


def held_out_falls(lines: Sequence[Line], window: int) -> str:
    """Compare the last evaluation with the best one before, and the reward before both.

    The best of several evaluations is also the luckiest. If there are three or more, the better of
    the last two must be below the best one, so that a single unlucky evaluation is no alarm.
    """
    lines = lines[-MAX_HELD_OUT_STEPS:]
    evaluated = [place for place, line in enumerate(lines) if HELD_OUT in line and not math.isnan(line[HELD_OUT])]
    if len(evaluated) < 2:
        return ""
    num_last = min(2, len(evaluated) - 1)
    best = max(evaluated[:-num_last], key=lambda place: lines[place][HELD_OUT])
    last, before, after = evaluated[-1], lines[best][HELD_OUT], max(lines[place][HELD_OUT] for place in evaluated[-num_last:])
    num, variance = lines[last].get("eval/greedy_episodes", 0.0), before * (1 - before) + after * (1 - after)
    noise = HELD_OUT_SIGMAS * math.sqrt(variance / num) if num > 0 and variance > 0 else 0.0
    early = values_of(lines[max(0, best + 1 - window) : best + 1], REWARD)
    late = values_of(lines[max(best + 1, last + 1 - window) : last + 1], REWARD)
    if after > before - max(HELD_OUT_MARGIN, noise) or 2 * min(len(early), len(late)) < window:
        return ""
    reward = Change(REWARD, early, late)
    return f"{HELD_OUT} {before:.4g} -> {after:.4g} while the reward rises ({reward})" if reward.rises else ""


def judge_score_falls(lines: Sequence[Line], window: int) -> str:
    """Compare the judge's mean score with the reward."""
    score, reward = change_of("judge/score", lines, window), change_of(REWARD, lines, window)
    if score is None or reward is None or not (score.falls and reward.rises):
        return ""
    return f"{score} while the reward rises ({reward})" if score.after <= score.before - MIN_JUDGE_DROP * abs(score.before) else ""


def judge_agreement_falls(lines: Sequence[Line], window: int) -> str:
    """Compare the agreement of judge and rules over all audits of a window with the reward."""
    (before, num_before), (after, num_after) = _count_agreement(lines[:window]), _count_agreement(lines[-window:])
    reward = change_of(REWARD, lines, window)
    if reward is None or not reward.rises or not min(num_before, num_after) > 0:
        return ""
    both = (before * num_before + after * num_after) / (num_before + num_after)
    noise = AGREEMENT_SIGMAS * math.sqrt(max(both * (1 - both), 0.0) * (1 / num_before + 1 / num_after))
    is_lower = before - after >= max(MIN_AGREEMENT_DROP, noise)
    return f"{AGREEMENT} {before:.4g} -> {after:.4g} while the reward rises ({reward})" if is_lower else ""


def _count_agreement(lines: Sequence[Line]) -> tuple[float, float]:
    """Return the fraction of audits in which judge and rules agree, and the number of audits."""
    pairs = [(line.get(AGREEMENT, math.nan), line.get("judge/audited", math.nan)) for line in lines]
    pairs = [(share, num) for share, num in pairs if not math.isnan(share + num)]
    total = sum(num for _, num in pairs)
    return sum(share * num for share, num in pairs) / total if total else math.nan, total


def one_term_dominates(lines: Sequence[Line], window: int) -> str:
    """Find a term, other than accuracy, that alone decides which rollouts of a group are better.

    Rivals are accuracy, and terms that mattered in the early window.
    """
    names = [name for name in lines[-1] if name.startswith(R2)] if lines else []
    terms = {name.removeprefix(R2): change for name in names if (change := change_of(name, lines, window)) is not None}
    for top, change in terms.items():
        rivals = {
            name: other for name, other in terms.items() if name != top and (name == ACCURACY_TERM or other.before >= MINOR_R2)
        }  # fmt: skip
        is_minor = all(other.after <= MINOR_R2 for other in rivals.values())
        if top != ACCURACY_TERM and change.after >= DOMINANT_R2 and rivals and is_minor:
            return f"{change} while the other terms decide little ({', '.join(map(str, rivals.values()))})"
    return ""


def responses_grow(lines: Sequence[Line], window: int) -> str:
    """Find responses that become longer without reward."""
    change = change_of("rollout/response_tokens", lines, window)
    return without_reward(change, lambda it: it.after >= LENGTH_FACTOR * it.before > 0, lines, window)


def responses_shrink(lines: Sequence[Line], window: int) -> str:
    """Find responses that become shorter without reward."""
    change = change_of("rollout/response_tokens", lines, window)
    return without_reward(change, lambda it: it.after * LENGTH_FACTOR <= it.before, lines, window)


def tool_use_dies(lines: Sequence[Line], window: int) -> str:
    """Find a policy that no longer uses its tools, whatever the reward does."""
    change = change_of("rollout/tool_use", lines, window)
    return f"{change}" if change and change.before >= MIN_TOOL_USE and change.after * TOOL_USE_DROP <= change.before else ""


def groups_collapse(lines: Sequence[Line], window: int) -> str:
    """Find groups that become equal without a rise of the reward.

    The first update may already break a policy. The last window is therefore also compared with the
    first step alone: then each reward of the window must be below that of the first step.
    """
    name = "rollout/zero_std_fraction"
    change = change_of(name, lines, window)
    text = without_reward(change, lambda it: it.before <= MIXED_FRACTION and it.after >= COLLAPSED_FRACTION, lines, window)
    first, late = values_of(lines[:1], name), values_of(lines[1:][-window:], name)
    reward, rewards = values_of(lines[:1], REWARD), values_of(lines[1:][-window:], REWARD)
    is_broken = 2 * min(len(late), len(rewards)) >= window and first and reward and max(rewards) < reward[0] and first[0] <= MIXED_FRACTION
    if text or len(lines) <= window or not is_broken or statistics.median(late) < COLLAPSED_FRACTION:
        return text
    return f"{Change(name, first, late)} since the first step, with less reward ({Change(REWARD, reward, rewards)})"


def entropy_grows(lines: Sequence[Line], window: int) -> str:
    """Find entropy that grows without reward."""
    change = change_of("policy/entropy", lines, window)
    return without_reward(change, lambda it: it.after >= ENTROPY_GROWTH * it.before > 0, lines, window)


def entropy_collapses(lines: Sequence[Line], window: int) -> str:
    """Find entropy that vanishes without reward."""
    change = change_of("policy/entropy", lines, window)
    return without_reward(change, lambda it: it.after * ENTROPY_DROP <= it.before, lines, window)


def kl_grows(lines: Sequence[Line], window: int) -> str:
    """Find a KL divergence that is large and grows, whatever the reward does."""
    changes = {name: change_of(name, lines, window) for name in MIN_KL}
    grown = [it for name, it in changes.items() if it and it.after >= max(MIN_KL[name], KL_GROWTH * it.before)]
    return ", ".join(map(str, grown))


def mismatch_grows(lines: Sequence[Line], window: int) -> str:
    """Find logprobs of engine and trainer that drift apart, whatever the reward does."""
    change = change_of("rollout_mismatch/logprob_abs_diff", lines, window)
    return f"{change}" if change and change.after >= max(MIN_MISMATCH, MISMATCH_GROWTH * change.before) else ""


def duplicates_grow(lines: Sequence[Line], window: int) -> str:
    """Find groups with more and more equal responses without a rise of the reward."""
    change = change_of("rollout/duplicate_fraction", lines, window)
    return without_reward(change, lambda it: it.after >= max(MIN_DUPLICATES, it.before + DUPLICATES_RISE), lines, window)


RULES: dict[str, Rule] = {
    "held_out_falls": held_out_falls,
    "judge_score_falls": judge_score_falls,
    "judge_agreement_falls": judge_agreement_falls,
    "one_term_dominates": one_term_dominates,
    "responses_grow": responses_grow,
    "responses_shrink": responses_shrink,
    "tool_use_dies": tool_use_dies,
    "groups_collapse": groups_collapse,
    "entropy_grows": entropy_grows,
    "entropy_collapses": entropy_collapses,
    "kl_grows": kl_grows,
    "mismatch_grows": mismatch_grows,
    "duplicates_grow": duplicates_grow,
}
