"""What chance and perfect play earn in the card games, exactly where that can be worked out, and by playing.

    python benchmarks/games_random.py --episodes 100000

Random play draws every action uniformly from all that the game has, as RL4VLM does for a reply that it cannot read. A success is an episode
whose return is above 0. Intervals are Wilson's, 95%.
"""

import argparse
import random
from collections.abc import Callable
from functools import cache

import numpy as np

from megatron_rl.config import TaskSettings
from megatron_rl.evaluation.intervals import wilson
from megatron_rl.tasks.gym_cards.blackjack import Blackjack
from megatron_rl.tasks.gym_cards.blackjack_table import POSITIONS, best_table, play
from megatron_rl.tasks.gym_cards.number_line import MAX_STEPS, STATES, policy_success, start_probabilities
from megatron_rl.tasks.gym_cards.number_line import move as walk
from megatron_rl.tasks.gym_cards.points import BLANK, EZPOINTS, POINTS24, Rules, Table, deal_four, deal_pair, move, suited
from megatron_rl.tasks.gym_cards.points_task import Points24Task
from megatron_rl.tasks.gym_cards.solvers import hands_of_four, solution, starts_of_pairs
from megatron_rl.tasks.task_options import Points24Options


def random_points(rules: Rules) -> float:
    """Of EZPoints: the share of wins over all that can be written, hand by hand. No six penalties outweigh a win."""

    @cache
    def wins(table: Table, length: int) -> float:
        """`table` is without its blanks, which are counted in the length of the formula alone."""
        if length > rules.max_entries:
            return 0.0
        share = 0.0
        for action in range(len(rules.tokens)):
            after, reward, is_over, _ = move(rules, table, action)
            formula = tuple(token for token in after.formula if token != BLANK)
            share += float(reward > 0) if is_over else wins(Table(table.cards, formula), length + 1)
        return share / len(rules.tokens)

    dice = np.random.default_rng(0)
    return sum(float(share) * wins(Table(suited(ranks, dice)), 0) for ranks, share in starts_of_pairs().items())


def walked(dice: random.Random) -> float:
    (state,), earned = dice.choices(STATES, [float(start_probabilities()[state]) for state in STATES]), 0
    for _ in range(MAX_STEPS):
        state, reward = walk(state, dice.randrange(2))
        earned += reward
        if reward == 1:
            break
    return earned


def written(rules: Rules, deal: Callable[[np.random.Generator], tuple], dealer: np.random.Generator, dice: random.Random) -> float:
    table, earned, is_over = Table(deal(dealer)), 0, False
    while not is_over:
        table, reward, terminated, truncated = move(rules, table, dice.randrange(len(rules.tokens)))
        earned, is_over = earned + reward, terminated or truncated
    return earned


def tossed(game: Blackjack, dice: random.Random) -> float:
    game.reset()
    reward, is_over = 0.0, False
    while not is_over:
        _, reward, is_over, _, _ = game.step(dice.randrange(2))
    return reward


def told(wins: int, num: int) -> str:
    low, high = wilson(wins / num, num)
    return f"{100 * wins / num:.3f} ({100 * max(low, 0):.3f} to {100 * high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000, help="of random play in each game")
    num, dice, dealer = parser.parse_args().episodes, random.Random(0), np.random.default_rng(0)
    game = Blackjack(symbolic=True)
    game.reset(seed=0)
    hands = hands_of_four()
    held_out = Points24Task(TaskSettings(name="points24", options=Points24Options()))
    solved_share = np.mean([bool(held_out.gold(example)) for example in held_out.examples("eval")])
    solvable = f"{100 * float(sum(share for hand, share in hands.items() if solution(hand))):.2f}; of the 500 {100 * solved_share:.1f}"
    coin, most_wins, best = play(dict.fromkeys(POSITIONS, 0.5)), play(best_table(by="wins")), play(best_table())
    rows = (
        ("number_line", policy_success({state: (0.5, 0.5) for state in STATES}), lambda: walked(dice), "100"),
        ("ez_points", random_points(EZPOINTS), lambda: written(EZPOINTS, lambda dealer: deal_pair(EZPOINTS, dealer), dealer, dice), "100"),
        ("points24", None, lambda: written(POINTS24, deal_four, dealer, dice), solvable),
        ("blackjack", coin.wins, lambda: tossed(game, dice), f"{100 * most_wins.wins:.2f}; of best return {100 * best.wins:.2f}"),
    )
    print("| game | random, exactly % | random, played % (95%) | best % |\n|---|---|---|---|")
    for name, exact, episode, ceiling in rows:
        wins = sum(episode() > 0 for _ in range(num))
        print(f"| {name} | {'-' if exact is None else f'{100 * exact:.3f}'} | {told(wins, num)} | {ceiling} |", flush=True)
    print(f"\nMean return of Blackjack: random {coin.reward:.4f}, most wins {most_wins.reward:.4f}, best {best.reward:.4f}.")


if __name__ == "__main__":
    main()
