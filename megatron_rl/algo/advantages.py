"""Credit: what every sampled token is worth, written to TokenSequence.advantages of all rollouts that were scored.

Plain floats, no tensors. Sums are exact (`statistics`), so a result depends neither on the order of the rollouts nor on the rank. A rollout
that is dropped (Rollout.filter_reason) still counts in its group's baseline. A group needs two scored members: without one to compare
with, a rollout's credit is 0.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron_rl.config import AlgoSettings
from megatron_rl.types import Rollout, TokenSequence

AdvantageFn = Callable[[Sequence[Rollout], AlgoSettings], None]
RELATIVE_ROUNDING, ABSOLUTE_ROUNDING = 1e-9, 1e-12
"""See `are_nearly_equal`."""


def grpo(rollouts: Sequence[Rollout], algo: AlgoSettings) -> None:
    """GRPO (arXiv 2402.03300, section 4.1.2): A_i = (R_i - mean(R)) / (std(R) + std_eps) over the group.

    Without algo.norm_adv_by_std A_i = R_i - mean(R), Dr. GRPO (arXiv 2503.20783, section 3.2). std is the sample deviation (divisor
    G - 1): the paper leaves it open, and the common implementations take torch.std's default. algo.turn_credit (TURN_SCHEMES) says what
    R_i is for a turn.
    """
    for members in split_into_groups(rollouts).values():
        for rollout, turns in zip(members, TURN_SCHEMES[algo.turn_credit](members, algo), strict=True):
            write_turn_advantages(rollout, turns)


def rloo(rollouts: Sequence[Rollout], algo: AlgoSettings) -> None:
    """RLOO (arXiv 2402.14740, eq. 4): A_i = R_i - mean of the others' = G / (G - 1) * (R_i - mean(R))."""
    for members in split_into_groups(rollouts).values():
        centered = _centered([penalized_reward(rollout, algo) for rollout in members])
        for rollout, value in zip(members, centered, strict=True):
            write_turn_advantages(rollout, [value * len(members) / max(len(members) - 1, 1)] * len(rollout.turns))


def opo(rollouts: Sequence[Rollout], algo: AlgoSettings) -> None:
    """OPO (arXiv 2505.23585): A_i = R_i - sum(n_j R_j) / sum(n_j), the baseline of least variance; n counts an episode's sampled tokens."""
    for members in split_into_groups(rollouts).values():
        rewards, lengths = [penalized_reward(rollout, algo) for rollout in members], [rollout.num_sampled for rollout in members]
        baseline = math.fsum(n * r for n, r in zip(lengths, rewards, strict=True)) / max(sum(lengths), 1)
        is_flat = are_nearly_equal(rewards)
        for rollout, reward in zip(members, rewards, strict=True):
            write_turn_advantages(rollout, [0.0 if is_flat else reward - baseline] * len(rollout.turns))


def reinforce_pp(rollouts: Sequence[Rollout], algo: AlgoSettings) -> None:
    """REINFORCE++ (arXiv 2501.03262): the return from each token on, whitened over all tokens of the step that are trained on.

    The episode's reward is earned by its last token, a KL penalty (algo.use_kl_in_reward) by each.
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


def broadcast(members: Sequence[Rollout], algo: AlgoSettings) -> list[list[float]]:
    """Every turn has what its episode has: R_i - mean(R), over the deviation of the rewards."""
    relative = _group_relative([penalized_reward(rollout, algo) for rollout in members], algo)
    return [[value] * len(rollout.turns) for rollout, value in zip(members, relative, strict=True)]


def outcome_and_turn(members: Sequence[Rollout], algo: AlgoSettings) -> list[list[float]]:
    """The outcome's advantage, plus for a turn that is a step how its score compares with the group's steps of the same number.

    A turn that is no step (Turn.step_score None) and a step that nobody else has have the outcome's alone. As MT-GRPO (arXiv 2505.11821,
    the authors' code) adds a turn's advantage to the outcome's; there both are normalized by themselves, which loses their weights, and a
    turn is also credited with those after it.
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
    """What was still to be earned from a turn on, the outcome included, against the others that reached a turn of this number.

    G_t = outcome + sum over s >= t of discount^(s - t) * gain_s (process supervision, arXiv 2402.03300, section 4.1.3). A baseline of
    others' returns depends on nothing that the turn decides, so the expected gradient is that of the reward. A turn that nobody else
    reached is compared with what the others earned in all: its credit is the episode's, R_i - mean(R). A KL penalty in the reward is part
    of the outcome: the whole episode's is taken off every turn.
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
    """GiGPO (arXiv 2505.10978, section 4): A_episode + gigpo_step_weight * A_state.

    A_state compares the return from a turn on, sum over s >= t of discount^(s - t) r_s, with those of all turns of the group, of
    whatever number and episode, that began in the same state (Turn.state). Each of the two is divided by its own deviation, or by
    none: the paper's two F_norm. A turn whose state no other began in, or is not known, has its episode's credit alone, as in the
    authors' code. The outcome is earned by the last turn.
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
"""Credit of each turn of each member of a group, normalized where algo.norm_adv_by_std says so. Where each episode is one turn, and that
is a step for all of them or for none, the first three are R_i - mean(R)."""


def group_std(rollouts: Sequence[Rollout], algo: AlgoSettings) -> dict[int, float]:
    """How far each group's credits lie from 0: their root mean square, not normalized. 0: the group teaches nothing.

    For one turn an episode that is the deviation of its rewards. KL penalties are left out: they are known only after the selection.
    """
    algo, spread = replace(algo, use_kl_in_reward=False, norm_adv_by_std=False), {}
    for group, members in split_into_groups(rollouts).items():
        values = [value for turns in TURN_SCHEMES[algo.turn_credit](members, algo) for value in turns]
        if algo.turn_credit == "broadcast":
            values = _centered([penalized_reward(rollout, algo) for rollout in members])
        spread[group] = math.sqrt(math.fsum(value * value for value in values) / max(len(values), 1))
    return spread


def split_into_groups(rollouts: Sequence[Rollout]) -> dict[int, list[Rollout]]:
    """The scored members of each group, in order."""
    groups: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if not rollout.is_scored:
            continue
        assert rollout.reward is not None, f"rollout {rollout.example_id}#{rollout.sample_index} is {rollout.status} but was never scored"
        groups[rollout.group].append(rollout)
    return groups


def penalized_reward(rollout: Rollout, algo: AlgoSettings) -> float:
    """The episode's reward, less its KL penalty."""
    return rollout.reward - kl_penalty(rollout, algo)


def kl_penalty(rollout: Rollout, algo: AlgoSettings) -> float:
    """The sum of its tokens' KL costs; 0 where the rollout is not trained on: its tokens were not read, and its bare reward stands in its
    group's baseline."""
    return math.fsum(cost for context in rollout.sequences for cost in kl_costs(context, algo)) if rollout.is_trained_on else 0.0


def kl_costs(context: TokenSequence, algo: AlgoSettings) -> list[float]:
    """kl_coef * (old - reference logprob) of each sampled token, where algo.use_kl_in_reward takes that off its reward; 0 otherwise."""
    if not (algo.use_kl_in_reward and any(context.loss_mask)):
        return [0.0] * len(context.token_ids)
    columns = zip(context.old_logprobs, context.reference_logprobs, context.loss_mask, strict=True)
    return [algo.kl_coef * (old - reference) if sampled else 0.0 for old, reference, sampled in columns]


def turn_rewards(rollout: Rollout, outcome: float) -> list[float]:
    """What each turn earned, the outcome as the last one's."""
    return [turn.reward_delta + (outcome if number == len(rollout.turns) else 0.0) for number, turn in enumerate(rollout.turns, start=1)]


def whiten(credits: Sequence[Sequence[float]]) -> list[list[float]]:
    """All of them shifted and scaled together to mean 0 and deviation 1: (x - mean) / sqrt(var + 1e-8), var with the divisor N - 1."""
    every = [value for values in credits for value in values]
    if are_nearly_equal(every):
        return [[0.0] * len(values) for values in credits]
    mean, scale = _mean(every), math.sqrt(_stdev(every) ** 2 + 1e-8)
    return [[(value - mean) / scale for value in values] for values in credits]


def normalize_group(credits: list[list[float]], algo: AlgoSettings) -> list[list[float]]:
    """Divided by one deviation a group, so that weights of turn parts count, where algo.norm_adv_by_std says so."""
    scale = root_mean_square(credits)
    return [_scaled_by(turns, scale, algo) for turns in credits]


def root_mean_square(credits: Sequence[Sequence[float]]) -> float:
    """Root of the credits' mean square, with the divisor N - 1 of a sample deviation."""
    values = [value for turns in credits for value in turns]
    return math.sqrt(math.fsum(value * value for value in values) / max(len(values) - 1, 1))


def write_turn_advantages(rollout: Rollout, turns: Sequence[float]) -> None:
    """Give every sampled token its turn's credit."""
    columns = [[0.0] * len(context.token_ids) for context in rollout.sequences]
    for turn, value in zip(rollout.turns, turns, strict=True):
        start, stop = turn.token_span
        columns[turn.sequence][start:stop] = [value] * (stop - start)
    for context, column in zip(rollout.sequences, columns, strict=True):
        context.set_column("advantages", column)


def are_nearly_equal(values: Sequence[float]) -> bool:
    """Return True if values differ by no more than rounding does: by 1e-9 of the largest one, or by 1e-12.

    The second bound is for sums that cancel. Example: [0.1 + 0.2, 0.3] and [0.1 + 0.2 - 0.3, 0.0] are equal.
    """
    largest = max(map(abs, values), default=0.0)
    return not values or max(values) - min(values) <= max(RELATIVE_ROUNDING * largest, ABSOLUTE_ROUNDING)


def _centered(values: Sequence[float]) -> list[float]:
    """Each less the mean; equal values, one alone included, give exact zeros."""
    if are_nearly_equal(values):
        return [0.0] * len(values)
    mean = _mean(values)
    return [value - mean for value in values]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values or [0.0])


def _group_relative(values: Sequence[float], algo: AlgoSettings) -> list[float]:
    """(value - mean) / (std + std_eps), the division where algo.norm_adv_by_std says so."""
    return _scaled_by(_centered(values), _stdev(values), algo)


def _scaled_by(values: Sequence[float], scale: float, algo: AlgoSettings) -> list[float]:
    if not algo.norm_adv_by_std:
        return list(values)
    return [value / (scale + algo.std_eps) if value else 0.0 for value in values]


def _leave_one_out_differences(values: Sequence[float], num_members: int) -> list[float]:
    """Each less the mean of the others, times (G - 1) / G: the scale of R_i - mean(R), however few of the G members have a value."""
    scale = len(values) / max(len(values) - 1, 1) * (num_members - 1) / num_members
    return [value * scale for value in _centered(values)]


def _stdev(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _returns(rollout: Rollout, algo: AlgoSettings) -> list[float]:
    """From each turn on, and with each the whole outcome."""
    outcome = rollout.outcome_reward - kl_penalty(rollout, algo)
    return [outcome + later for later in _rewards_to_go([turn.reward_delta for turn in rollout.turns], algo.gamma)]


def _discounted(rollout: Rollout, algo: AlgoSettings) -> list[float]:
    """From each turn on; the outcome is discounted too, as a reward of the last turn."""
    return _rewards_to_go(turn_rewards(rollout, rollout.outcome_reward - kl_penalty(rollout, algo)), algo.gamma)


def _rewards_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """From each on, the sum over s >= t of discount^(s - t) r_s."""
    values, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + discount * later
        values.append(later)
    return values[::-1]


def _token_returns(rollout: Rollout, algo: AlgoSettings) -> list[list[float]]:
    """For each context the return from each sampled token on."""
    later, contexts = rollout.reward, []
    for context in reversed(rollout.sequences):
        values: list[float] = []
        for cost, sampled in zip(reversed(kl_costs(context, algo)), reversed(context.loss_mask), strict=True):
            later -= cost
            values += [later] * sampled
        contexts.append(values[::-1])
    return contexts[::-1]
