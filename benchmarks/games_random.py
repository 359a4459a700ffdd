"""Success rates of random play (exact and simulated) and of optimal play in the card games.

    python benchmarks/games_random.py --episodes 100000

Random play draws every action uniformly from all actions of the game, as RL4VLM does after a
response that cannot be parsed. An episode is a success if its return is above 0. Intervals are 95%
Wilson intervals.
"""

import argparse
import random
from collections.abc import Callable
from functools import cache

import numpy as np

from megatron_rl.config import TaskSettings
from megatron_rl.config.task_options import Points24Options
from megatron_rl.evaluation.intervals import wilson_interval
from megatron_rl.tasks.gym_cards.blackjack import Blackjack
from megatron_rl.tasks.gym_cards.blackjack_table import POSITIONS, best_policy, evaluate_policy
from megatron_rl.tasks.gym_cards.number_line import MAX_STEPS, STATES, compute_policy_success, start_probabilities
from megatron_rl.tasks.gym_cards.number_line import apply_action as walk
from megatron_rl.tasks.gym_cards.points import (
    BLANK,
    EZPOINTS,
    POINTS24,
    PointsRules,
    PointsState,
    add_suits,
    apply_action,
    deal_four,
    deal_pair,
)
from megatron_rl.tasks.gym_cards.points_task import Points24Task
from megatron_rl.tasks.gym_cards.solvers import find_solution, hand_probabilities, pair_probabilities


def random_points(rules: PointsRules) -> float:
    """Return the exact success rate of random play in EZPoints, over all formulas and deals.

    The return of a won episode is above 0 even after six penalties, the maximum.
    """

    @cache
    def wins(table: PointsState, length: int) -> float:
        """Return the probability of a win.

        Blanks count toward `length`, but `table.formula` does not contain them.
        """
        if length > rules.max_formula_tokens:
            return 0.0
        share = 0.0
        for action in range(len(rules.tokens)):
            after, reward, is_over, _ = apply_action(rules, table, action)
            formula = tuple(token for token in after.formula if token != BLANK)
            share += float(reward > 0) if is_over else wins(PointsState(table.cards, formula), length + 1)
        return share / len(rules.tokens)

    dice = np.random.default_rng(0)
    return sum(float(share) * wins(PointsState(add_suits(ranks, dice)), 0) for ranks, share in pair_probabilities().items())


def walked(dice: random.Random) -> float:
    """Run one random episode of NumberLine and return its return."""
    (state,), earned = dice.choices(STATES, [float(start_probabilities()[state]) for state in STATES]), 0
    for _ in range(MAX_STEPS):
        state, reward = walk(state, dice.randrange(2))
        earned += reward
        if reward == 1:
            break
    return earned


def written(rules: PointsRules, deal: Callable[[np.random.Generator], tuple], dealer: np.random.Generator, dice: random.Random) -> float:
    """Run one random episode of a points game and return its return."""
    table, earned, is_over = PointsState(deal(dealer)), 0, False
    while not is_over:
        table, reward, terminated, truncated = apply_action(rules, table, dice.randrange(len(rules.tokens)))
        earned, is_over = earned + reward, terminated or truncated
    return earned


def tossed(game: Blackjack, dice: random.Random) -> float:
    """Run one random episode of Blackjack and return its return."""
    game.reset()
    reward, is_over = 0.0, False
    while not is_over:
        _, reward, is_over, _, _ = game.step(dice.randrange(2))
    return reward


def told(wins: int, num: int) -> str:
    """Return the win rate in percent and its 95% confidence interval, as text."""
    low, high = wilson_interval(wins / num, num)
    return f"{100 * wins / num:.3f} ({100 * max(low, 0):.3f} to {100 * high:.3f})"


def main() -> None:
    """Run the simulation and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000, help="random episodes per game")
    num, dice, dealer = parser.parse_args().episodes, random.Random(0), np.random.default_rng(0)
    game = Blackjack(symbolic=True)
    game.reset(seed=0)
    hands = hand_probabilities()
    held_out = Points24Task(TaskSettings(name="points24", options=Points24Options()))
    solved_share = np.mean([bool(held_out.gold_replies(example)) for example in held_out.examples("eval")])
    solvable = f"{100 * float(sum(share for hand, share in hands.items() if find_solution(hand))):.2f}; held out {100 * solved_share:.1f}"
    coin, most_wins, best = (
        evaluate_policy(dict.fromkeys(POSITIONS, 0.5)),
        evaluate_policy(best_policy(criterion="wins")),
        evaluate_policy(best_policy()),
    )
    rows = (
        ("number_line", compute_policy_success({state: (0.5, 0.5) for state in STATES}), lambda: walked(dice), "100"),
        ("ez_points", random_points(EZPOINTS), lambda: written(EZPOINTS, lambda dealer: deal_pair(EZPOINTS, dealer), dealer, dice), "100"),
        ("points24", None, lambda: written(POINTS24, deal_four, dealer, dice), solvable),
        ("blackjack", coin.wins, lambda: tossed(game, dice), f"{100 * most_wins.wins:.2f}; for the highest return {100 * best.wins:.2f}"),
    )
    print("| game | random play, exact % | random play, simulated % (95% CI) | best possible % |\n|---|---|---|---|")
    for name, exact, episode, ceiling in rows:
        wins = sum(episode() > 0 for _ in range(num))
        print(f"| {name} | {'-' if exact is None else f'{100 * exact:.3f}'} | {told(wins, num)} | {ceiling} |", flush=True)
    print(
        f"\nMean return in Blackjack: random play {coin.reward:.4f}, policy with the most wins {most_wins.reward:.4f}, "
        f"policy with the highest return {best.reward:.4f}."
    )


if __name__ == "__main__":
    main()
