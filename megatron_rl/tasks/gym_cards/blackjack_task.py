"""Blackjack as a task: the prompt, starts drawn by seed, and demonstrations by the table of best return.

The policy sees the picture and replies with one JSON object, e.g.
    {"thoughts": "15 against 7", "action": "hit"}
An example fixes what is seen at the start, in drawings that the other split has not; the rest of the game is dealt by the episode's seed,
the same for all of a group.
"""

import json
import random
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from megatron_rl.config import TaskSettings, require_choice
from megatron_rl.tasks.gym_cards.blackjack import ACTIONS, MAX_STEPS, Blackjack, Table, draw_card, picture, total
from megatron_rl.tasks.gym_cards.blackjack_table import Position, best_table
from megatron_rl.tasks.gym_cards.cards import Card, drawing_is_held_out
from megatron_rl.tasks.gym_cards.game import GameEnv, GameTask, Shown, Transcripts, asked
from megatron_rl.tasks.options import BlackjackOptions
from megatron_rl.types import Example, Message

PROMPT = (
    "Blackjack: come nearer to 21 than the dealer, and not above it; the dealer draws to 17. J, Q and K count 10, an ace 1 or 11. "
    'Answer with one JSON object: {"thoughts": text, "action": "stand" or "hit"}'
)


def position_of(table: Table) -> Position:
    return *total(table.player), table.dealer[0].value


def write_reply(table: Table, action: int) -> str:
    """The reply that adds up right and takes the action."""
    points, is_soft, up = position_of(table)
    return json.dumps({"thoughts": f"{'soft ' if is_soft else ''}{points} against {up}", "action": ACTIONS[action]})


class BlackjackTask(GameTask):
    """Blackjack for the trainer. An episode succeeds when it is won: its return is above 0."""

    Options = BlackjackOptions

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        self.require_turns(MAX_STEPS, eval_max_steps=MAX_STEPS)

    def examples(self, split: str) -> list[Example]:
        is_eval = split == "eval"
        look = (self.options.eval_art, self.options.eval_card_scale) if is_eval else ("large", 1.0)
        num = self.options.eval_hands if is_eval else self.options.train_hands
        starts = zip(range(num), starts_of(np.random.default_rng(int(is_eval)), is_held_out=is_eval), strict=False)
        return [
            Example(id=f"{split}{number}", payload={"player": [str(one), str(two)], "dealer": str(up), "look": look})
            for number, (up, one, two) in starts
        ]

    def env(self, example: Example) -> GameEnv:
        look = example.payload["look"]
        game = Blackjack(natural=self.options.natural, sab=self.options.sab, symbolic=True)

        def show() -> Shown:
            assert game.table is not None
            return picture(game.table, look), PROMPT

        start = {key: example.payload[key] for key in ("player", "dealer")}
        return GameEnv(game, start, actions=ACTIONS, options=self.options, show=show)

    @cached_property
    def best(self) -> dict[Position, int]:
        """The action of best return in every position."""
        return best_table()

    def demonstrations(self, split: str, *, num: int, seed: int) -> Transcripts[tuple[Table, int]]:
        """Single turns: one of each game as the best table plays it, from starts of split train. Fewer are a prefix of more."""
        require_choice("sft.splits", split, ("correct",))
        dice, choice = np.random.default_rng(seed), random.Random(seed)
        starts = starts_of(np.random.default_rng((seed, 1)), is_held_out=False)
        return Transcripts([choice.choice(self._game(start, dice)) for start, _ in zip(starts, range(num), strict=False)], _transcript)

    def _game(self, start: tuple[Card, ...], dice: np.random.Generator) -> list[tuple[Table, int]]:
        up, *player = start
        table, turns = Table(tuple(player), (up,)), []
        while total(table.player)[0] <= 21:
            action = self.best[position_of(table)]
            turns.append((table, action))
            if action == 0:
                break
            table = Table((*table.player, draw_card(dice)), table.dealer)
        return turns


def starts_of(dice: np.random.Generator, *, is_held_out: bool) -> Iterator[tuple[Card, ...]]:
    """The dealer's card up and the player's two, as dealt, in the drawings of a split, without end."""
    while True:
        start = tuple(draw_card(dice) for _ in range(3))
        if drawing_is_held_out(start) == is_held_out:
            yield start


def _transcript(plan: tuple[Table, int]) -> list[Message]:
    table, action = plan
    return [asked(picture(table), PROMPT), {"role": "assistant", "content": [{"type": "text", "text": write_reply(table, action)}]}]
