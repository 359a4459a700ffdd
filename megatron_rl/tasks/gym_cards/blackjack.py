"""Blackjack of GymCards, with an infinite deck and one visible dealer card.

Actions are indices into ACTIONS: 0 means stand, 1 means hit. The rules are the same as in RL4VLM
and in gymnasium's toy_text/blackjack (Sutton and Barto, example 5.1):

- If the player exceeds 21 points (a bust), the game ends with reward -1.
- After the player stands, the dealer draws cards until the dealer's hand has at least 17 points. An
  ace counts as 11 unless the hand would exceed 21. The reward is 1 if the dealer exceeds 21 points
  or has fewer points than the player, 0 if the points are equal, and -1 otherwise.
- Cards with the value 10 are dealt as J, Q or K, never as 10.
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
from megatron_rl.tasks.gym_cards.cards import SUITS, Card, load_font, paste_card
from megatron_rl.tasks.gym_cards.number_line import IMAGE_SIZE, pixels_space
from megatron_rl.tasks.gym_cards.points import BACKGROUND_COLOR, CardStyle

ACTIONS = ("stand", "hit")
MAX_STEPS = 21
"""Upper bound on the number of steps in a game: 20 hits and one stand."""
ROW_LAYOUTS = ((4, 70, 98), (5, 49, 69), (8, 32, 45))
"""(cards per row, card width, card height), in pixels. A hand is drawn in the first layout in which
all of its cards are visible.
"""


@dataclass(slots=True, frozen=True)
class BlackjackState:
    """State of a game.

    The dealer's first card is always visible. The dealer's other cards are visible only after the
    game is over.
    """

    player: tuple[Card, ...]
    dealer: tuple[Card, ...]
    is_over: bool = False


def hand_total(cards: Sequence[Card]) -> tuple[int, bool]:
    """Return a pair: the points of a hand, and True if an ace counts as 11.

    Example: the result is (17, True) for A 6 and (17, False) for A 6 10.
    """
    hard = sum(card.value for card in cards)
    is_soft = hard <= 11 and any(card.rank == 1 for card in cards)
    return hard + 10 * is_soft, is_soft


def is_natural(cards: Sequence[Card]) -> bool:
    """Return True if the hand has two cards and 21 points."""
    return len(cards) == 2 and hand_total(cards)[0] == 21


def compute_payoff(state: BlackjackState, *, natural: bool = False, sab: bool = False) -> float:
    """Return the reward after the player has stood and the dealer has drawn.

    The reward is 1 for a win, 0 for a draw and -1 for a loss. If `natural` is set and `sab` is not,
    a win with a natural has reward 1.5. If `sab` is set, a player with a natural wins unless the
    dealer also has a natural.
    """
    player, dealer = hand_total(state.player)[0], hand_total(state.dealer)[0]
    reward = 1.0 if dealer > 21 else float((player > dealer) - (player < dealer))
    if sab and is_natural(state.player) and not is_natural(state.dealer):
        return 1.0
    return 1.5 if natural and not sab and is_natural(state.player) and reward == 1 else reward


def deal_card(rng: np.random.Generator) -> Card:
    """Return a random card. A card with the value 10 is a J, Q or K."""
    rank = int(rng.integers(1, 14))
    return Card(int(rng.integers(11, 14)) if rank >= 10 else rank, SUITS[rng.integers(4)])


@lru_cache(maxsize=128)
def draw_state(state: BlackjackState, style: CardStyle = ("large", 1.0)) -> Image.Image:
    """Return the RGB image of a state, 300 x 300 pixels.

    The image is cached and shared by all turns in this state: do not modify it.
    """
    drawn = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), BACKGROUND_COLOR)
    pen = ImageDraw.Draw(drawn)
    pen.text((5, 5), "Dealer", fill="white", font=load_font(15))
    pen.text((5, 130), "Player", fill="white", font=load_font(15))
    _paste_cards(drawn, state.dealer if state.is_over else (state.dealer[0], None), top=25, gap=3, height=104, style=style)
    _paste_cards(drawn, state.player, top=150, gap=4, height=150, style=style)
    return drawn


def _paste_cards(drawn: Image.Image, cards: Sequence[Card | None], *, top: int, gap: int, height: int, style: CardStyle) -> None:
    columns, width, card_height = next(each for each in ROW_LAYOUTS if len(cards) <= each[0] * (height // (each[2] + gap)))
    for number, card in enumerate(cards):
        row, column = divmod(number, columns)
        corner = 5 + column * (width + gap), top + row * (card_height + gap)
        paste_card(drawn, card, corner, size=(width, card_height), style=style)


BlackjackObservation = NDArray[np.uint8] | tuple[int, int, int]


class Blackjack(gymnasium.Env[BlackjackObservation, int]):
    """`gym_cards/Blackjack-v0`: get closer to 21 points than the dealer without exceeding 21.

    Calling `reset(options={"player": ["AS", "6H"], "dealer": "KD"})` sets the initially visible
    cards. An observation is a uint8 array of shape [300, 300, 3]. With symbolic=True, an
    observation is a tuple of three integers: the player's points, the value of the dealer's visible
    card (1 to 10), and is_soft. The value of is_soft is 1 if an ace counts as 11, else 0.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 1}
    action_space: gymnasium.spaces.Discrete

    def __init__(
        self, *, natural: bool = False, sab: bool = False, symbolic: bool = False,
        style: CardStyle = ("large", 1.0), render_mode: str | None = None,
    ) -> None:  # fmt: skip
        self.action_space = gymnasium.spaces.Discrete(len(ACTIONS))
        self.natural, self.sab, self.symbolic, self.style, self.render_mode = natural, sab, symbolic, style, render_mode
        self.state: BlackjackState | None = None

    @cached_property
    def observation_space(self) -> gymnasium.spaces.Tuple[np.int64] | gymnasium.spaces.Box[np.uint8]:
        """Space of image or symbolic observations."""
        spaces = gymnasium.spaces
        return spaces.Tuple((spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2))) if self.symbolic else pixels_space()

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[BlackjackObservation, dict[str, object]]:
        """Start an episode and return the observation and the info dict."""
        super().reset(seed=seed)
        up, hidden, *player = [deal_card(self.np_random) for _ in range(4)]
        if options:
            player, up = _read_fixed_start(options)
        self.state = BlackjackState(tuple(player), (up, hidden))
        return self._observation(), self._info()

    def step(self, action: int) -> tuple[BlackjackObservation, float, bool, bool, dict[str, object]]:
        """Apply an action and return gymnasium's step tuple."""
        assert self.state is not None and not self.state.is_over, "step before reset"
        require(self.action_space.contains(action), "action", action, "use 0 for stand or 1 for hit")
        if action == 1:
            player = (*self.state.player, deal_card(self.np_random))
            is_bust = hand_total(player)[0] > 21
            self.state = replace(self.state, player=player, is_over=is_bust)
            return self._observation(), -1.0 if is_bust else 0.0, is_bust, False, self._info()
        dealer = self.state.dealer
        while hand_total(dealer)[0] < 17:
            dealer = (*dealer, deal_card(self.np_random))
        self.state = replace(self.state, dealer=dealer, is_over=True)
        return self._observation(), compute_payoff(self.state, natural=self.natural, sab=self.sab), True, False, self._info()

    def render(self) -> NDArray[np.uint8]:
        """Return the image as a new array."""
        assert self.state is not None, "render before reset"
        return np.array(draw_state(self.state, self.style))

    def _observation(self) -> BlackjackObservation:
        assert self.state is not None
        points, is_soft = hand_total(self.state.player)
        return (points, self.state.dealer[0].value, int(is_soft)) if self.symbolic else self.render()

    def _info(self) -> dict[str, object]:
        assert self.state is not None
        shown = self.state.dealer if self.state.is_over else self.state.dealer[:1]
        return {"Player": [str(card) for card in self.state.player], "Dealer": [str(card) for card in shown]}


def _read_fixed_start(options: Mapping[str, object]) -> tuple[list[Card], Card]:
    player = options.get("player")
    remedy = "must contain exactly the keys player (a list of two cards) and dealer (a card)"
    is_start = options.keys() == {"player", "dealer"} and isinstance(player, list | tuple) and len(player) == 2
    require(is_start, "options", dict(options), remedy)
    assert isinstance(player, list | tuple)
    return [Card.from_name(name) for name in player], Card.from_name(options["dealer"])
