"""Blackjack as a task: prompt, seeded random initial hands, and demonstrations.

The policy receives an image and the rules, and replies with one JSON object:

    {"thoughts": "K 5: 15 against 7", "action": "hit"}

An example from the train split specifies the initially visible cards. The episode's seed determines
all later cards and is the same for all rollouts of a group.

Evaluation on the eval split does not play games. Instead, the policy chooses one action in each
of the 280 positions, for hands with suit combinations that training never uses. The expected
outcome of full games with these actions is then computed exactly (blackjack_table.evaluate_policy),
so the metrics have no sampling noise from the cards.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from megatron_rl.config import TaskSettings, require_choice
from megatron_rl.config.task_options import BlackjackOptions
from megatron_rl.rollout.task import Env, Step
from megatron_rl.tasks.gym_cards.blackjack import ACTIONS, MAX_STEPS, Blackjack, BlackjackState, deal_card, draw_state, hand_total
from megatron_rl.tasks.gym_cards.blackjack_table import POSITIONS, Position, add_card, best_policy, evaluate_policy
from megatron_rl.tasks.gym_cards.cards import SUITS, Card, is_held_out_drawing
from megatron_rl.tasks.gym_cards.game import GameEnv, GameTask, LazyTranscripts, StateView, make_user_message, parse_reply
from megatron_rl.tasks.gym_cards.points import CardStyle
from megatron_rl.types import Example, Message, Rollout

PROMPT = (
    "Blackjack: come nearer to 21 than the dealer, and not above it; the dealer draws to 17. J, Q and K count 10, an ace 1 or 11. "
    'Answer with one JSON object: {"thoughts": text, "action": "stand" or "hit"}'
)

BIASED_MIN_DEALER_VALUE = 7
"""Minimum value of the dealer's visible card (1 for an ace) at which the demonstrator of the
"biased" split makes mistakes.
"""
BIASED_ERROR = 0.6
"""Probability that the demonstrator of the "biased" split stands regardless of its hand. Such
mistakes occur only if the value of the dealer's visible card is at least BIASED_MIN_DEALER_VALUE.
With the remaining probability and in all other turns, the demonstrator follows the optimal policy.
"""
DEALT_VALUES = (*range(1, 10), 10, 10, 10, 10)
"""Values of 13 equally likely cards: 1 to 9 once each, and 10 four times (10, J, Q and K)."""


def get_position(state: BlackjackState) -> Position:
    """Return (player's points, True if the hand is soft, value of the dealer's card)."""
    return *hand_total(state.player), state.dealer[0].value


def write_reply(state: BlackjackState, action: int) -> str:
    """Return a reply that states the cards and their sum correctly and takes the given action."""
    points, is_soft, up = get_position(state)
    cards = " ".join(card.symbol for card in state.player)
    return json.dumps({"thoughts": f"{cards}: {'soft ' if is_soft else ''}{points} against {up}", "action": ACTIONS[action]})


class PlannedTurn(NamedTuple):
    """Turn of a demonstration: state of the game, index of the action and style of the cards."""

    table: BlackjackState
    action: int
    style: CardStyle


class PositionEnv(Env):
    """Environment in which the policy chooses one action in a given position.

    The episode ends after one reply. The reward is 0, and the game is not continued.
    """

    def __init__(self, game_state: BlackjackState, *, style: CardStyle, options: BlackjackOptions) -> None:
        self.game_state, self.style, self.options = game_state, style, options

    async def reset(self, seed: int) -> list[Message]:
        """Return the initial observation of the hand. The seed is not used."""
        return [make_user_message(draw_state(self.game_state, self.style), PROMPT)]

    async def step(self, text: str) -> Step:
        """Parse the reply and end the episode."""
        _, call = parse_reply(text, self.options, ACTIONS)
        return Step(messages=[], reward=0.0, done=True, reason="asked", tool_call=call)


class BlackjackTask(GameTask):
    """Blackjack task. An episode succeeds if the game is won, i.e. if its return is above 0."""

    Options = BlackjackOptions

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        self.require_turns(MAX_STEPS, eval_max_steps=MAX_STEPS)

    def examples(self, split: str) -> list[Example]:
        """Return the examples of a split: initial hands for train, positions for eval."""
        if split == "eval":
            return self.positions
        starts = islice(deal_starts(np.random.default_rng(0), is_held_out=False), self.options.train_hands)
        return [
            Example(id=f"{split}{number}", payload={"player": [str(one), str(two)], "dealer": str(up)})
            for number, (up, one, two) in enumerate(starts)
        ]

    @cached_property
    def positions(self) -> list[Example]:
        """Examples of the eval split. Each position has task.options.eval_drawings hands."""
        return [
            Example(
                id=f"{'soft' if is_soft else 'hard'}{points}_against{value}_{number}",
                payload={"player": list(map(str, player)), "dealer": str(up), "position": (points, is_soft, value)},
            )
            for points, is_soft, value in POSITIONS
            for number, (up, *player) in enumerate(deal_hands_at((points, is_soft, value), num=self.options.eval_drawings))
        ]

    def env(self, example: Example) -> Env:
        """Return a new environment: a game for the train split, a single position for eval."""
        if "position" in example.payload:
            player, up = map(Card.from_name, example.payload["player"]), Card.from_name(example.payload["dealer"])
            return PositionEnv(BlackjackState(tuple(player), (up,)), style=self.options.eval_style, options=self.options)
        style = self.options.draw_train_style(random.Random(example.id))
        game = Blackjack(natural=self.options.natural, sab=self.options.sab, symbolic=True)

        def show() -> StateView:
            assert game.state is not None
            name = f"{' '.join(map(str, game.state.player))} against {game.state.dealer[0]}"
            return StateView(draw_state(game.state, style), PROMPT, name)

        return GameEnv(game, example.payload, actions=ACTIONS, options=self.options, view_state=show)

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the success rate, draw rate and return of full games.

        The metrics describe a player who takes the actions that the policy chose in the rollouts.
        The player's expected outcome is computed exactly, without sampling games.

        If the policy's actions differ between hands in the same position, the player's action is
        random, with the frequencies of the policy's actions. A reply without a valid action counts
        as a forfeit, regardless of task.options.invalid. A position without a scored rollout also
        counts as a forfeit.
        """
        said: dict[Position, list[str]] = defaultdict(list)
        for rollout in rollouts:
            call = rollout.turns[0].tool_call
            assert call is not None, "every step of the game has a call"
            said[examples[rollout.group].payload["position"]].append(call.source if call.ran else "")
        hits = {position: said[position].count("hit") / max(len(said[position]), 1) for position in POSITIONS}
        stands = {position: said[position].count("stand") / max(len(said[position]), 1) for position in POSITIONS}
        forfeits = {position: 1 - hits[position] - stands[position] for position in POSITIONS}
        worth = evaluate_policy(hits, forfeit_probabilities=forfeits, natural=self.options.natural, sab=self.options.sab)
        figures = {"success": worth.wins, "draws": worth.draws, "return": worth.reward}
        return super().extra_metrics(examples, rollouts) | figures

    @cached_property
    def best_actions(self) -> dict[Position, int]:
        """Maps each position to the action with the highest expected return."""
        return best_policy()

    def demonstrations(self, split: str, *, num: int, seed: int) -> LazyTranscripts[PlannedTurn]:
        """Return single-turn demonstrations from complete games with suits of the train split.

        A larger `num` with the same seed returns the same demonstrations, followed by additional
        ones. In the "correct" split, the demonstrator follows the optimal policy. In the "biased"
        split, the demonstrator makes mistakes if the value of the dealer's visible card is at least
        BIASED_MIN_DEALER_VALUE. In this case, the demonstrator stands with probability
        BIASED_ERROR, regardless of the hand. With greedy decoding, a policy that has the same
        action probabilities as the "biased" demonstrator wins 40.0% of its games.
        """
        require_choice("sft.splits", split, self.demonstration_splits)
        dice, error = np.random.default_rng(seed), BIASED_ERROR if split == "biased" else 0.0
        starts = deal_starts(np.random.default_rng((seed, 1)), is_held_out=False)
        style_dice = random.Random(f"style {seed}")
        turns = (turn for start in starts for turn in self._play_game(start, dice, error=error))
        plans = [PlannedTurn(*turn, self.options.draw_train_style(style_dice)) for turn in islice(turns, num)]
        return LazyTranscripts(plans, _write_transcript)

    def _play_game(self, start: tuple[Card, ...], rng: np.random.Generator, *, error: float) -> list[tuple[BlackjackState, int]]:
        up, *player = start
        table, turns = BlackjackState(tuple(player), (up,)), []
        while hand_total(table.player)[0] <= 21:
            is_wrong = up.value >= BIASED_MIN_DEALER_VALUE and rng.random() < error
            action = 0 if is_wrong else self.best_actions[get_position(table)]
            turns.append((table, action))
            if action == 0:
                break
            table = BlackjackState((*table.player, deal_card(rng)), table.dealer)
        return turns


def deal_starts(rng: np.random.Generator, *, is_held_out: bool) -> Iterator[tuple[Card, ...]]:
    """Yield an infinite sequence of random initial hands with one split's suit combinations.

    Each entry is the dealer's visible card followed by the player's two cards.
    """
    while True:
        start = tuple(deal_card(rng) for _ in range(3))
        if is_held_out_drawing(start) == is_held_out:
            yield start


@cache
def deal_hands_at(position: Position, *, num: int) -> list[tuple[Card, ...]]:
    """Return `num` random hands for a position, with the suit combinations of the eval split.

    Each hand is the dealer's visible card followed by the player's cards. The hands are distributed
    as in games in which the player hits with probability 1/2.
    """
    points, is_soft, up = position
    dice = random.Random(repr(position))
    hands: list[tuple[Card, ...]] = []
    while len(hands) < num:
        values = [dice.choice(DEALT_VALUES), dice.choice(DEALT_VALUES)]
        sums = add_card(*add_card(0, False, values[0]), values[1])
        while sums != (points, is_soft) and sums[0] <= 21 and dice.random() < 0.5:
            values.append(dice.choice(DEALT_VALUES))
            sums = add_card(*sums, values[-1])
        if sums == (points, is_soft):
            hands.append(_draw_suits((up, *values), dice))
    return hands


def _draw_suits(values: Sequence[int], rng: random.Random) -> tuple[Card, ...]:
    """Return random cards with the given values.

    The suits of the first three cards form a combination that is reserved for evaluation.
    """
    while True:
        cards = tuple(Card(rng.randint(11, 13) if value == 10 else value, rng.choice(SUITS)) for value in values)
        if is_held_out_drawing(cards[:3]):
            return cards


def _write_transcript(plan: PlannedTurn) -> list[Message]:
    return [
        make_user_message(draw_state(plan.table, plan.style), PROMPT),
        {"role": "assistant", "content": [{"type": "text", "text": write_reply(plan.table, plan.action)}]},
    ]
