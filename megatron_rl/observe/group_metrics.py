"""Metrics that compare the rollouts of a group with each other; docs/alarms.md uses them."""

import statistics
from collections.abc import Sequence
from itertools import compress, groupby
from operator import attrgetter

from megatron_rl.types import JudgeResult, Rollout

MIN_VARIANCE = 1e-12
"""Sums of squared differences up to this value count as zero, because rewards are rounded."""


def group_metrics(scored: Sequence[Rollout]) -> dict[str, float]:
    """Return the share of duplicates, the r2 of each term, and the judge's score and agreement.

    `scored` are the scored rollouts of a step.
    """
    return {
        "rollout/duplicate_fraction": _count_duplicates(scored) / max(len(scored), 1),
        **{f"reward_r2/{name}": value for name, value in explained_by_term(scored).items()},
        **_judge_metrics([verdict for rollout in scored for verdict in rollout.verdicts]),
    }


def _judge_metrics(verdicts: Sequence[JudgeResult]) -> dict[str, float]:
    """Return the mean of the verdicts in rewards, and how often judge and rules agree in audits.

    They agree if both scores are at least 0.5, or both less.
    """
    values = [each.value for each in verdicts if each.is_reward]
    agreed = [(each.value >= 0.5) == (each.rule_score >= 0.5) for each in verdicts if each.rule_score is not None]
    return {
        **({"judge/score": statistics.fmean(values)} if values else {}),
        **({"judge/agreement": statistics.fmean(agreed), "judge/audited": float(len(agreed))} if agreed else {}),
    }


def explained_by_term(scored: Sequence[Rollout]) -> dict[str, float]:
    """Return r2 of each reward term: its squared correlation with the reward inside groups.

    Both are taken relative to their means in the group, as advantages are. With r2 = 1, a term
    alone decides which rollouts of a group are better; with 0, it decides nothing. Weights of the
    terms need not be known. The result is empty if rewards are equal in each group.

    Example: a group with the rewards 3, 2, 1, 0 and the values 1, 1, 0, 0 of a term. Differences
    are 1.5, 0.5, -0.5, -1.5 and 0.5, 0.5, -0.5, -0.5, so that r2 is 2^2 / (5 * 1) = 0.8.
    """
    names = dict.fromkeys(name for rollout in scored for name in rollout.reward_terms)
    rewards = [difference for group in _groups(scored) for difference in _centered([each.reward or 0.0 for each in group])]
    if sum(value * value for value in rewards) <= MIN_VARIANCE:
        return {}
    return {name: _squared_correlation(scored, name) for name in names}


def _squared_correlation(scored: Sequence[Rollout], name: str) -> float:
    product = reward_square = term_square = 0.0
    for group in _groups([rollout for rollout in scored if name in rollout.reward_terms]):
        rewards = _centered([each.reward or 0.0 for each in group])
        terms = _centered([each.reward_terms[name] for each in group])
        product += sum(one * other for one, other in zip(rewards, terms, strict=True))
        reward_square += sum(value * value for value in rewards)
        term_square += sum(value * value for value in terms)
    is_constant = min(reward_square, term_square) <= MIN_VARIANCE
    return 0.0 if is_constant else product * product / (reward_square * term_square)


def _centered(values: Sequence[float]) -> list[float]:
    mean = statistics.fmean(values)
    return [value - mean for value in values]


def _groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    return [list(group) for _, group in groupby(sorted(rollouts, key=attrgetter("group")), key=attrgetter("group"))]


def _count_duplicates(scored: Sequence[Rollout]) -> int:
    """Return the number of rollouts with the sampled tokens of an earlier one of their group."""
    sampled = [(each.group, *(tuple(compress(part.token_ids, part.loss_mask)) for part in each.sequences)) for each in scored]
    return len(sampled) - len(set(sampled))
