"""Advantage functions, which write TokenSequence.advantages for all scored rollouts.

Advantages are computed on plain floats, not tensors. Sums are exact (`statistics`, `math.fsum`), so
every rank computes the same results, regardless of the order of the rollouts. A filtered rollout
(Rollout.filter_reason) still contributes to its group's baseline. Group-relative advantages are 0
in groups with fewer than two scored rollouts.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron_rl.config import AlgoSettings
from megatron_rl.types import Rollout, TokenSequence

AdvantageFn = Callable[[Sequence[Rollout], AlgoSettings], None]
"""(rollouts, settings) -> None. Writes the advantages for all scored rollouts."""
RELATIVE_ROUNDING, ABSOLUTE_ROUNDING = 1e-9, 1e-12
"""Relative and absolute tolerance of `are_nearly_equal`."""


def grpo(rollouts: Sequence[Rollout], algo: AlgoSettings) -> None:
    """Compute GRPO advantages: A_i = (R_i - mean(R)) / (std(R) + std_eps) over the group.

    Source: arXiv 2402.03300, section 4.1.2. If algo.norm_adv_by_std is not set, the advantage is
    R_i - mean(R) (arXiv 2503.20783, section 3.2; preset dr_grpo). The function std computes the
    sample standard deviation (Bessel's correction), like torch.std; the paper does not specify the
    divisor. Unless algo.turn_credit is broadcast, each turn has its own advantage (TURN_SCHEMES).
    """
    for members in split_into_groups(rollouts).values():
        for rollout, turns in zip(members, TURN_SCHEMES[algo.turn_credit](members, algo), strict=True):
            write_turn_advantages(rollout, turns)


def rloo(rollouts: Sequence[Rollout], algo: AlgoSettings) -> None:
    """Compute RLOO advantages: A_i = R_i - mean of the rewards of the group's other rollouts.

    Source: arXiv 2402.14740, eq. 4. In a group of G rollouts, the advantage equals G / (G - 1) *
    (R_i - mean(R)).
    """
    for members in split_into_groups(rollouts).values():
        centered = _centered([penalized_reward(rollout, algo) for rollout in members])
        for rollout, value in zip(members, centered, strict=True):
            write_turn_advantages(rollout, [value * len(members) / max(len(members) - 1, 1)] * len(rollout.turns))


def opo(rollouts: Sequence[Rollout], algo: AlgoSettings) -> None:
    """Compute OPO advantages: A_i = R_i - sum(n_j R_j) / sum(n_j).

    Source: arXiv 2505.23585. n_j is the number of sampled tokens of rollout j. The length-weighted
    baseline minimizes the variance of the policy gradient under the assumptions of the paper.
    """
    for members in split_into_groups(rollouts).values():
        rewards, lengths = [penalized_reward(rollout, algo) for rollout in members], [rollout.num_sampled for rollout in members]
        baseline = math.fsum(n * r for n, r in zip(lengths, rewards, strict=True)) / max(sum(lengths), 1)
        is_flat = are_nearly_equal(rewards)
        for rollout, reward in zip(members, rewards, strict=True):
            write_turn_advantages(rollout, [0.0 if is_flat else reward - baseline] * len(rollout.turns))


def reinforce_pp(rollouts: Sequence[Rollout], algo: AlgoSettings) -> None:
    """Compute REINFORCE++ advantages: returns-to-go whitened over all tokens that are trained on.

    Source: arXiv 2501.03262. The episode's reward is assigned to the last token. With
    algo.use_kl_in_reward, each token's KL penalty is subtracted from the reward of that token.
    """
    scored = [rollout for members in split_into_groups(rollouts).values() for rollout in members]
    trained = [rollout for rollout in scored if rollout.is_trained_on]
    for rollout in scored:
        write_turn_advantages(rollout, [0.0] * len(rollout.turns))
    contexts = [context for rollout in trained for context in rollout.sequences]
    returns = [values for rollout in trained for values in _token_returns(rollout, algo)]
    for context, values in zip(contexts, whiten(returns), strict=True):
        credits = iter(values)
        context.set_column("advantages", [next(credits) if sampled else 0.0 for sampled in context.loss_mask])


def no_advantage(rollouts: Sequence[Rollout], algo: AlgoSettings) -> None:
    """Write advantages of 0, so that rewards have no effect on the policy."""
    for members in split_into_groups(rollouts).values():
        for rollout in members:
            write_turn_advantages(rollout, [0.0] * len(rollout.turns))


def broadcast(members: Sequence[Rollout], algo: AlgoSettings) -> list[list[float]]:
    """Assign the episode-level advantage, R_i - mean(R), to every turn of the episode.

    If algo.norm_adv_by_std is set, the advantage is divided by the standard deviation of the
    rewards.
    """
    relative = _group_relative([penalized_reward(rollout, algo) for rollout in members], algo)
    return [[value] * len(rollout.turns) for rollout, value in zip(members, relative, strict=True)]


def outcome_and_turn(members: Sequence[Rollout], algo: AlgoSettings) -> list[list[float]]:
    """Return each turn's outcome advantage, plus a score advantage if the turn has a score.

    A turn's score is compared with the scores of the group's turns with the same index. A turn gets
    only the outcome advantage if it has no score (Turn.step_score is None) or if no other rollout
    of the group has a scored turn with the same index.

    The authors' code of MT-GRPO (arXiv 2505.11821) differs from this function in two ways. The code
    normalizes the two advantages separately, so that their relative weights are lost. The code adds
    the score advantages of later turns to each turn's advantage.
    """
    outcomes = _centered([rollout.outcome_reward - kl_penalty(rollout, algo) for rollout in members])
    credits = [[value] * len(rollout.turns) for rollout, value in zip(members, outcomes, strict=True)]
    steps: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for index, rollout in enumerate(members):
        for number, turn in enumerate(rollout.turns):
            if turn.step_score is not None:
                steps[number].append((index, turn.step_score))
    for number, scored in steps.items():
        for (index, _), value in zip(scored, _leave_one_out_differences([score for _, score in scored], len(members)), strict=True):
            credits[index][number] += value
    return normalize_group(credits, algo)


def return_to_go(members: Sequence[Rollout], algo: AlgoSettings) -> list[list[float]]:
    """Return each turn's return-to-go relative to the group's rollouts that reached the same turn.

    G_t = outcome + sum over s >= t of gamma^(s - t) * reward_delta_s (process supervision, arXiv
    2402.03300, section 4.1.3). The baseline is computed from the returns of other episodes and does
    not depend on the turn's action, so the policy gradient is unbiased.

    If only one rollout of the group reached a turn index, that turn gets the episode-level
    advantage, R_i - mean(R). A KL penalty in the reward is part of the outcome, so the penalty of
    the whole episode is subtracted from every turn's return.
    """
    returns = [_returns(rollout, algo) for rollout in members]
    credits = broadcast(members, replace(algo, norm_adv_by_std=False))
    for number in range(max(map(len, returns))):
        reached = [index for index, values in enumerate(returns) if len(values) > number]
        if len(reached) == 1:
            continue
        for index, value in zip(
            reached, _leave_one_out_differences([returns[index][number] for index in reached], len(members)), strict=True
        ):
            credits[index][number] = value
    return normalize_group(credits, algo)


def gigpo(members: Sequence[Rollout], algo: AlgoSettings) -> list[list[float]]:
    """Return GiGPO advantages: A_episode + gigpo_step_weight * A_state.

    Source: arXiv 2505.10978, section 4. The return-to-go of turn t is G_t = sum over s >= t of
    gamma^(s - t) r_s. A_state compares G_t with the returns-to-go of all turns in the group that
    started in the same state (Turn.state), at any turn index and in any episode. If
    algo.norm_adv_by_std is set, A_episode and A_state are each divided by their own standard
    deviation (F_norm = std in the paper); otherwise, neither advantage is divided (F_norm = 1).

    A_state is 0 if the turn's state is unknown or if no other turn started in that state, as in the
    authors' code. The outcome is part of the last turn's reward.
    """
    credits = broadcast(members, algo)
    begun: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for index, rollout in enumerate(members):
        for number, (turn, value) in enumerate(zip(rollout.turns, _discounted(rollout, algo), strict=True)):
            if turn.state:
                begun[turn.state].append((index, number, value))
    for turns in begun.values():
        for (index, number, _), value in zip(turns, _group_relative([value for _, _, value in turns], algo), strict=True):
            credits[index][number] += algo.gigpo_step_weight * value
    return credits


TURN_SCHEMES: Mapping[str, Callable[[Sequence[Rollout], AlgoSettings], list[list[float]]]] = {
    "broadcast": broadcast,
    "outcome_and_turn": outcome_and_turn,
    "return_to_go": return_to_go,
    "gigpo": gigpo,
}
"""Turn-credit functions, keyed by algo.turn_credit. Each returns one advantage per turn of every
rollout in a group, normalized if algo.norm_adv_by_std is set. If every episode has one turn, and
these turns are all scored or all unscored, then broadcast, outcome_and_turn and return_to_go all
equal R_i - mean(R) before normalization.
"""


def group_std(rollouts: Sequence[Rollout], algo: AlgoSettings) -> dict[int, float]:
    """Return the root mean square of each group's unnormalized advantages, keyed by group.

    A value of 0 means that the group has no training signal. For single-turn episodes, the value is
    the standard deviation of the rewards. KL penalties are ignored, because they are computed only
    after filtering.
    """
    algo, spread = replace(algo, use_kl_in_reward=False, norm_adv_by_std=False), {}
    for group, members in split_into_groups(rollouts).items():
        values = [value for turns in TURN_SCHEMES[algo.turn_credit](members, algo) for value in turns]
        if algo.turn_credit == "broadcast":
            values = _centered([penalized_reward(rollout, algo) for rollout in members])
        spread[group] = math.sqrt(math.fsum(value * value for value in values) / max(len(values), 1))
    return spread


def split_into_groups(rollouts: Sequence[Rollout]) -> dict[int, list[Rollout]]:
    """Return the scored rollouts of each group in the given order, keyed by group."""
    groups: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if not rollout.is_scored:
            continue
        assert rollout.reward is not None, f"rollout {rollout.example_id}#{rollout.sample_index} is {rollout.status} but was never scored"
        groups[rollout.group].append(rollout)
    return groups


def penalized_reward(rollout: Rollout, algo: AlgoSettings) -> float:
    """Return the episode's reward minus its KL penalty."""
    assert rollout.reward is not None, "only scored rollouts have a reward"
    return rollout.reward - kl_penalty(rollout, algo)


def kl_penalty(rollout: Rollout, algo: AlgoSettings) -> float:
    """Return the sum of the KL costs of a rollout's tokens.

    The penalty of a filtered rollout is 0, because its logprobs are not computed. The reward of a
    filtered rollout still contributes to the group's baseline, without a penalty.
    """
    return math.fsum(cost for context in rollout.sequences for cost in kl_costs(context, algo)) if rollout.is_trained_on else 0.0


def kl_costs(context: TokenSequence, algo: AlgoSettings) -> list[float]:
    """Return kl_coef * (old - reference logprob) for sampled tokens and 0 for observed tokens.

    All costs are 0 unless algo.use_kl_in_reward is set.
    """
    if not (algo.use_kl_in_reward and any(context.loss_mask)):
        return [0.0] * len(context.token_ids)
    columns = zip(context.old_logprobs, context.reference_logprobs, context.loss_mask, strict=True)
    return [algo.kl_coef * (old - reference) if sampled else 0.0 for old, reference, sampled in columns]


def turn_rewards(rollout: Rollout, outcome: float) -> list[float]:
    """Return the reward of each turn, with the outcome added to the last turn's reward."""
    return [turn.reward_delta + (outcome if number == len(rollout.turns) else 0.0) for number, turn in enumerate(rollout.turns, start=1)]


def whiten(credits: Sequence[Sequence[float]]) -> list[list[float]]:
    """Shift and scale all values jointly to mean 0 and standard deviation 1.

    Each value x becomes (x - mean) / sqrt(var + 1e-8), where var has the divisor N - 1. If all
    values are nearly equal, all results are 0.
    """
    every = [value for values in credits for value in values]
    if are_nearly_equal(every):
        return [[0.0] * len(values) for values in credits]
    mean, scale = _mean(every), math.sqrt(_stdev(every) ** 2 + 1e-8)
    return [[(value - mean) / scale for value in values] for values in credits]


def normalize_group(credits: list[list[float]], algo: AlgoSettings) -> list[list[float]]:
    """If algo.norm_adv_by_std is set, divide all advantages of a group by one common scale.

    The scale is the root mean square of the advantages. One common divisor preserves the weights of
    turn rewards relative to the outcome.
    """
    scale = root_mean_square(credits)
    return [_scaled_by(turns, scale, algo) for turns in credits]


def root_mean_square(credits: Sequence[Sequence[float]]) -> float:
    """Return the root mean square of the values, with divisor N - 1 (as in the sample variance)."""
    values = [value for turns in credits for value in turns]
    return math.sqrt(math.fsum(value * value for value in values) / max(len(values) - 1, 1))


def write_turn_advantages(rollout: Rollout, turns: Sequence[float]) -> None:
    """Write each turn's advantage to all sampled tokens of the turn."""
    columns = [[0.0] * len(context.token_ids) for context in rollout.sequences]
    for turn, value in zip(rollout.turns, turns, strict=True):
        start, stop = turn.token_span
        columns[turn.sequence][start:stop] = [value] * (stop - start)
    for context, column in zip(rollout.sequences, columns, strict=True):
        context.set_column("advantages", column)


def are_nearly_equal(values: Sequence[float]) -> bool:
    """Return True if the values differ only by rounding errors.

    Values are nearly equal if their range is at most 1e-9 times the largest absolute value, or at
    most 1e-12. The absolute bound is needed for sums that cancel to almost zero. Examples of
    nearly equal values: [0.1 + 0.2, 0.3] and [0.1 + 0.2 - 0.3, 0.0].
    """
    largest = max(map(abs, values), default=0.0)
    return not values or max(values) - min(values) <= max(RELATIVE_ROUNDING * largest, ABSOLUTE_ROUNDING)


def _centered(values: Sequence[float]) -> list[float]:
    """Return values minus their mean; exact zeros if all values are nearly equal."""
    if are_nearly_equal(values):
        return [0.0] * len(values)
    mean = _mean(values)
    return [value - mean for value in values]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values or [0.0])


def _group_relative(values: Sequence[float], algo: AlgoSettings) -> list[float]:
    """Return value - mean, divided by std + std_eps if algo.norm_adv_by_std is set."""
    return _scaled_by(_centered(values), _stdev(values), algo)


def _scaled_by(values: Sequence[float], scale: float, algo: AlgoSettings) -> list[float]:
    if not algo.norm_adv_by_std:
        return list(values)
    return [value / (scale + algo.std_eps) if value else 0.0 for value in values]


def _leave_one_out_differences(values: Sequence[float], num_members: int) -> list[float]:
    """Return each value minus the mean of all other values, times (G - 1) / G.

    With this factor, the differences have the same scale as R_i - mean(R), even if only some of the
    group's G rollouts have a value.
    """
    scale = len(values) / max(len(values) - 1, 1) * (num_members - 1) / num_members
    return [value * scale for value in _centered(values)]


def _stdev(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _returns(rollout: Rollout, algo: AlgoSettings) -> list[float]:
    """Return the return-to-go of each turn plus the undiscounted outcome."""
    outcome = rollout.outcome_reward - kl_penalty(rollout, algo)
    return [outcome + later for later in _rewards_to_go([turn.reward_delta for turn in rollout.turns], algo.gamma)]


def _discounted(rollout: Rollout, algo: AlgoSettings) -> list[float]:
    """Return each turn's discounted return-to-go, with the outcome added to the last reward."""
    return _rewards_to_go(turn_rewards(rollout, rollout.outcome_reward - kl_penalty(rollout, algo)), algo.gamma)


def _rewards_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """Return, for each turn t, the sum over s >= t of discount^(s - t) * r_s."""
    values, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + discount * later
        values.append(later)
    return values[::-1]


def _token_returns(rollout: Rollout, algo: AlgoSettings) -> list[list[float]]:
    """Return the returns-to-go of the sampled tokens in each sequence, minus KL costs.

    Later tokens are those of later turns, also if the turns of several sequences alternate.
    """
    assert rollout.reward is not None, "only scored rollouts have a reward"
    later, costs = rollout.reward, [kl_costs(context, algo) for context in rollout.sequences]
    values = [[0.0] * len(context.token_ids) for context in rollout.sequences]
    for turn in reversed(rollout.turns):
        for place in reversed(range(*turn.token_span)):
            later -= costs[turn.sequence][place]
            values[turn.sequence][place] = later
    return [
        [value for value, sampled in zip(column, context.loss_mask, strict=True) if sampled]
        for column, context in zip(values, rollout.sequences, strict=True)
    ]
