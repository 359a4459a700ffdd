"""Generalized advantage estimation: what a critic's values make of an episode's rewards. Plain floats, no tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.algo.advantages import kl_costs, split_into_groups, turn_rewards, whiten, write_turn_advantages
from megatron_rl.config import AlgoSettings
from megatron_rl.types import Rollout, TokenSequence


@dataclass(slots=True, frozen=True)
class ActionSpan:
    """One step of an episode as the critic sees it: a turn or a token (algo.gae_level)."""

    context: TokenSequence
    start: int
    """Its first token, and one past its last."""
    stop: int
    reward: float

    @property
    def value(self) -> float:
        """What the critic expected before it."""
        return self.context.values[self.start]


def generalized_advantages(rollouts: Sequence[Rollout], algo: AlgoSettings) -> None:
    """PPO's credit (arXiv 1506.02438, eq. 16): A_t = d_t + g * lam * A_(t+1), d_t = r_t + g * V_(t+1) - V_t, with g = algo.gamma.
    V is 0 after the episode's end, whether it was completed or its budget ran out. The critic's target is A_t + V_t, before
    algo.whiten_advantages.

    Every token of a turn that is one action has its advantage; its return stands on the first.
    """
    scored = [rollout for members in split_into_groups(rollouts).values() for rollout in members]
    trained = [rollout for rollout in scored if rollout.is_trained_on]
    episodes = [split_into_actions(rollout, algo) for rollout in trained]
    gained = [gae([a.reward for a in actions], [a.value for a in actions], algo.gamma, algo.lam) for actions in episodes]
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
    """The critic's values and its targets, of all actions that are trained on."""
    actions = [action for rollout in rollouts if rollout.is_trained_on for action in split_into_actions(rollout, algo)]
    return [action.value for action in actions], [action.context.returns[action.start] for action in actions]


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Advantages of one episode's actions, in order."""
    advantages, later, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + gamma * next_value - value + gamma * lam * later
        next_value = value
        advantages.append(later)
    return advantages[::-1]


def split_into_actions(rollout: Rollout, algo: AlgoSettings) -> list[ActionSpan]:
    """An episode's actions with what each earned: a turn's gain on its last token, the outcome on the episode's last, and each token's KL
    penalty (algo.use_kl_in_reward) on itself."""
    actions, costs = [], [kl_costs(context, algo) for context in rollout.sequences]
    for turn, earned in zip(rollout.turns, turn_rewards(rollout, rollout.outcome_reward), strict=True):
        context, (first, stop) = rollout.sequences[turn.sequence], turn.token_span
        paid = costs[turn.sequence][first:stop]
        if algo.gae_level == "turns":
            actions.append(ActionSpan(context, first, stop, earned - math.fsum(paid)))
        else:
            rewards = [-cost for cost in paid[:-1]] + [earned - paid[-1]]
            actions += [ActionSpan(context, place, place + 1, reward) for place, reward in enumerate(rewards, first)]
    return actions
