"""Blackjack of GymCards: an infinite deck, one card of the dealer's up. Actions are indices into ACTIONS: 0 stands, 1 hits.

The rules are gymnasium's toy_text/blackjack (Sutton and Barto, example 5.1), as RL4VLM has them: a bust pays -1; after a stand the dealer
draws to 17, an ace counting 11 where it can, and the reward is the sign of player - dealer. Cards worth ten
are dealt as J, Q or K, never as 10.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from megatron_rl.config import require
from megatron_rl.tasks.gym_cards.cards import SUITS, Card, font, paste
from megatron_rl.tasks.gym_cards.number_line import IMAGE_SIZE, pixels_space
from megatron_rl.tasks.gym_cards.points import FELT, Look

ACTIONS = ("stand", "hit")
MAX_STEPS = 21
"""Twenty aces and the stand."""
LAYOUTS = ((4, 70, 98), (5, 49, 69), (8, 32, 45))
"""(cards in a row, width, height of a card): the first that holds a hand is taken, so that all cards are seen."""


@dataclass(slots=True, frozen=True)
class Table:
    """The state: the first of the dealer's cards is up, the others are seen when the game is over."""

    player: tuple[Card, ...]
    dealer: tuple[Card, ...]
    is_over: bool = False


def total(cards: Sequence[Card]) -> tuple[int, bool]:
    """The sum, and whether it counts an ace as 11. Example: A 6 is (17, True), A 6 10 is (17, False)."""
    hard = sum(card.value for card in cards)
    is_soft = hard <= 11 and any(card.rank == 1 for card in cards)
    return hard + 10 * is_soft, is_soft


def is_natural(cards: Sequence[Card]) -> bool:
    return len(cards) == 2 and total(cards)[0] == 21


def payoff(table: Table, *, natural: bool = False, sab: bool = False) -> float:
    """After a stand and the dealer's draws: 1 won, 0 drawn, -1 lost; 1.5 for a win by a natural where that is played."""
    player, dealer = total(table.player)[0], total(table.dealer)[0]
    reward = 1.0 if dealer > 21 else float((player > dealer) - (player < dealer))
    if sab and is_natural(table.player) and not is_natural(table.dealer):
        return 1.0
    return 1.5 if natural and not sab and is_natural(table.player) and reward == 1 else reward


def draw_card(dice: np.random.Generator) -> Card:
    rank = int(dice.integers(1, 14))
    return Card(int(dice.integers(11, 14)) if rank >= 10 else rank, SUITS[dice.integers(4)])


@lru_cache(maxsize=128)
def picture(table: Table, look: Look = ("large", 1.0)) -> Image.Image:
    """The RGB picture of a state, 300 x 300. Shared by every turn that shows it: not to be changed."""
    drawn = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), FELT)
    pen = ImageDraw.Draw(drawn)
    pen.text((5, 5), "Dealer", fill="white", font=font(15))
    pen.text((5, 130), "Player", fill="white", font=font(15))
    _lay_out(drawn, table.dealer if table.is_over else (table.dealer[0], None), top=25, gap=3, height=104, look=look)
    _lay_out(drawn, table.player, top=150, gap=4, height=150, look=look)
    return drawn


def _lay_out(drawn: Image.Image, cards: Sequence[Card | None], *, top: int, gap: int, height: int, look: Look) -> None:
    columns, *size = next(each for each in LAYOUTS if len(cards) <= each[0] * (height // (each[2] + gap)))
    for number, card in enumerate(cards):
        row, column = divmod(number, columns)
        paste(drawn, card, (5 + column * (size[0] + gap), top + row * (size[1] + gap)), size=tuple(size), look=look)


Seen = NDArray[np.uint8] | tuple[int, int, int]


class Blackjack(gymnasium.Env[Seen, int]):
    """`gym_cards/Blackjack-v0`. reset(options={"player": ["AS", "6H"], "dealer": "KD"}) fixes what is seen at the start.

    Observations are uint8 [300, 300, 3]; with symbolic=True (sum, the dealer's card up to 10, whether an ace counts 11).
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 1}

    def __init__(
        self, *, natural: bool = False, sab: bool = False, symbolic: bool = False,
        look: Look = ("large", 1.0), render_mode: str | None = None,
    ) -> None:  # fmt: skip
        self.action_space = gymnasium.spaces.Discrete(len(ACTIONS))
        self.natural, self.sab, self.symbolic, self.look, self.render_mode = natural, sab, symbolic, look, render_mode
        self.table: Table | None = None

    @cached_property
    def observation_space(self) -> gymnasium.Space[Seen]:
        spaces = gymnasium.spaces
        return spaces.Tuple((spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2))) if self.symbolic else pixels_space()

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[Seen, dict[str, object]]:
        super().reset(seed=seed)
        up, hidden, *player = [draw_card(self.np_random) for _ in range(4)]
        if options:
            player, up = _fixed_start(options)
        self.table = Table(tuple(player), (up, hidden))
        return self._observation(), self._info()

    def step(self, action: int) -> tuple[Seen, float, bool, bool, dict[str, object]]:
        assert self.table is not None and not self.table.is_over, "step before reset"
        require(self.action_space.contains(action), "action", action, "use 0 for stand or 1 for hit")
        if action == 1:
            player = (*self.table.player, draw_card(self.np_random))
            is_bust = total(player)[0] > 21
            self.table = replace(self.table, player=player, is_over=is_bust)
            return self._observation(), -1.0 if is_bust else 0.0, is_bust, False, self._info()
        dealer = self.table.dealer
        while total(dealer)[0] < 17:
            dealer = (*dealer, draw_card(self.np_random))
        self.table = replace(self.table, dealer=dealer, is_over=True)
        return self._observation(), payoff(self.table, natural=self.natural, sab=self.sab), True, False, self._info()

    def render(self) -> NDArray[np.uint8]:
        """The picture, as an array of the caller's own."""
        assert self.table is not None, "render before reset"
        return np.array(picture(self.table, self.look))

    def _observation(self) -> Seen:
        assert self.table is not None
        points, is_soft = total(self.table.player)
        return (points, self.table.dealer[0].value, int(is_soft)) if self.symbolic else self.render()

    def _info(self) -> dict[str, object]:
        assert self.table is not None
        shown = self.table.dealer if self.table.is_over else self.table.dealer[:1]
        return {"Player": [str(card) for card in self.table.player], "Dealer": [str(card) for card in shown]}


def _fixed_start(options: Mapping[str, object]) -> tuple[list[Card], Card]:
    player = options.get("player")
    remedy = "give player, a list of two cards, and dealer, a card, and nothing else"
    is_start = options.keys() == {"player", "dealer"} and isinstance(player, list | tuple) and len(player) == 2
    require(is_start, "options", dict(options), remedy)
    return [Card.named(name) for name in player], Card.named(options["dealer"])
