"""Generalized advantage estimation (GAE) from a critic's values, on plain floats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.algo.advantages import kl_costs, split_into_groups, turn_rewards, whiten, write_turn_advantages
from megatron_rl.config import AlgoSettings
from megatron_rl.types import Rollout, TokenSequence


@dataclass(slots=True, frozen=True)
class ActionSpan:
    """Tokens that GAE treats as one action: a turn or a single token (algo.gae_level)."""

    context: TokenSequence
    start: int
    """Position of the action's first token in the sequence."""
    stop: int
    """Position after the action's last token in the sequence."""
    reward: float
    """Reward of the action, minus KL penalties."""

    @property
    def value(self) -> float:
        """Critic's value of the state before the action."""
        return self.context.values[self.start]


def generalized_advantages(rollouts: Sequence[Rollout], algo: AlgoSettings) -> None:
    """Compute GAE advantages: A_t = d_t + g * lam * A_(t+1), with d_t = r_t + g * V_(t+1) - V_t.

    Source: arXiv 1506.02438, eq. 16, with g = algo.gamma and lam = algo.lam. V is 0 after the end
    of an episode, except with algo.bootstrap_truncated (see `final_value`). The critic's target is
    A_t + V_t, computed before advantages are whitened (algo.whiten_advantages).

    If a turn is one action (algo.gae_level=turns), all tokens of the turn have the same advantage,
    and the return is stored at the turn's first token.
    """
    scored = [rollout for members in split_into_groups(rollouts).values() for rollout in members]
    trained = [rollout for rollout in scored if rollout.is_trained_on]
    episodes = [split_into_actions(rollout, algo) for rollout in trained]
    gained = [
        gae([a.reward for a in actions], [a.value for a in actions], algo.gamma, algo.lam, final_value=final_value(rollout, algo))
        for rollout, actions in zip(trained, episodes, strict=True)
    ]
    credits = whiten(gained) if algo.whiten_advantages else gained
    for rollout in scored:
        for context in rollout.sequences:
            context.set_column("returns", [0.0] * len(context.token_ids))
        write_turn_advantages(rollout, [0.0] * len(rollout.turns))
    for actions, advantages, worth in zip(episodes, gained, credits, strict=True):
        for action, advantage, credit in zip(actions, advantages, worth, strict=True):
            action.context.returns[action.start] = advantage + action.value
            action.context.advantages[action.start : action.stop] = [credit] * (action.stop - action.start)


def values_and_returns(rollouts: Sequence[Rollout], algo: AlgoSettings) -> tuple[list[float], list[float]]:
    """Return the critic's values and targets for all actions in the rollouts to train on."""
    actions = [action for rollout in rollouts if rollout.is_trained_on for action in split_into_actions(rollout, algo)]
    return [action.value for action in actions], [action.context.returns[action.start] for action in actions]


def final_value(rollout: Rollout, algo: AlgoSettings) -> float:
    """Return the value of the state after the episode's last action.

    The value is 0, unless algo.bootstrap_truncated is set and the rollout has a final state. In
    this case, it is the critic's value of the final state.
    """
    final = rollout.final_state
    return final.values[-1] if algo.bootstrap_truncated and final is not None else 0.0


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float, *, final_value: float = 0.0) -> list[float]:
    """Return the GAE advantages of one episode's actions, in order.

    `final_value` is the value of the state after the last action.
    """
    advantages, later, next_value = [], 0.0, final_value
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + gamma * next_value - value + gamma * lam * later
        next_value = value
        advantages.append(later)
    return advantages[::-1]


def split_into_actions(rollout: Rollout, algo: AlgoSettings) -> list[ActionSpan]:
    """Split an episode into actions and assign a reward to each.

    The reward of a turn's last token is the turn's reward_delta. The outcome is added to the reward
    of the episode's last token. Each token's KL penalty (algo.use_kl_in_reward) is subtracted from
    the reward of that token.
    """
    actions, costs = [], [kl_costs(context, algo) for context in rollout.sequences]
    for turn, earned in zip(rollout.turns, turn_rewards(rollout, rollout.outcome_reward), strict=True):
        context, (first, stop) = rollout.sequences[turn.sequence], turn.token_span
        token_costs = costs[turn.sequence][first:stop]
        if algo.gae_level == "turns":
            actions.append(ActionSpan(context, first, stop, earned - math.fsum(token_costs)))
        else:
            rewards = [-cost for cost in token_costs[:-1]] + [earned - token_costs[-1]]
            actions += [ActionSpan(context, place, place + 1, reward) for place, reward in enumerate(rewards, first)]
    return actions
