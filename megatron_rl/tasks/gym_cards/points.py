"""EZPoints and Points24 of GymCards: write a formula that uses all cards and equals the target.

The rules are the same as in RL4VLM (arXiv 2405.10292). Each action appends a token to the formula.
The first matching rule determines the reward:

- If the formula already exceeds the length limit, the reward is -1, and the episode is truncated.
- The token "=" ends the game. The reward is 10 if the formula uses all cards and equals the target,
  else -1.
- If the token is a number that no unused card has, a blank is appended instead of the number, and
  the reward is -1.
- For all other tokens, the reward is 0.

There are two differences from RL4VLM. The environment has its own random number generator.
Formulas are evaluated under the strict rules of expressions.py unless legacy_rules=True.
"""

from collections import Counter
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
from megatron_rl.tasks.gym_cards.expressions import evaluate, evaluate_as_python
from megatron_rl.tasks.gym_cards.number_line import IMAGE_SIZE, pixels_space
from megatron_rl.tasks.gym_cards.solvers import find_partner_numbers, find_solution

BACKGROUND_COLOR = "#35654d"
BLANK = " "
NUMBERS = tuple(str(number) for number in range(1, 11))
CardStyle = tuple[str, float]
"""(art, scale): name of the card art, and card size as a fraction of the default size."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PointsRules:
    """Rules and layout parameters that differ between EZPoints and Points24."""

    tokens: tuple[str, ...]
    """Tokens that can be appended. An action is an index into this tuple."""
    num_cards: int
    target: int
    max_formula_tokens: int
    """Maximum number of tokens in a formula. If the formula already exceeds this maximum, the next
    action truncates the episode.
    """
    label_height: float
    """Vertical position of the label "Formula: ", as a fraction of the image height. If
    label_height is equal to formula_height, the label and the formula share a line.
    """
    formula_height: float
    font_size: int
    faces_are_ten: bool = True
    is_legacy: bool = False

    @property
    def max_steps(self) -> int:
        """Maximum number of steps in an episode. The last of these steps truncates the episode."""
        return self.max_formula_tokens + 2

    def card_number(self, card: Card) -> int:
        """Return the number that a card represents in a formula."""
        return card.value if self.faces_are_ten else card.rank


EZPOINTS = PointsRules(
    tokens=(*NUMBERS, "+", "*", "="), num_cards=2, target=12, max_formula_tokens=5, label_height=0.86, formula_height=0.86, font_size=20
)  # fmt: skip
POINTS24 = PointsRules(
    tokens=(*NUMBERS, "+", "-", "*", "/", "(", ")", "="), num_cards=4, target=24, max_formula_tokens=20,
    label_height=0.70, formula_height=0.80, font_size=16,
)  # fmt: skip
RANK_TOKENS = (*NUMBERS, "11", "12", "13", *POINTS24.tokens[10:])


@dataclass(slots=True, frozen=True)
class PointsState:
    """State of a game: the cards and the formula so far."""

    cards: tuple[Card, ...]
    formula: tuple[str, ...] = ()

    @property
    def formula_text(self) -> str:
        """Concatenated tokens of the formula."""
        return "".join(self.formula)


def apply_action(rules: PointsRules, state: PointsState, action: int) -> tuple[PointsState, int, bool, bool]:
    """Return the next state, the reward, and gymnasium's flags terminated and truncated."""
    if len(state.formula) > rules.max_formula_tokens:
        return state, -1, False, True
    token = rules.tokens[action]
    if token == "=":
        return state, 10 if makes_target(rules, state) else -1, True, False
    is_lacking = token.isdigit() and not unused_numbers(rules, state)[token]
    return replace(state, formula=(*state.formula, BLANK if is_lacking else token)), -1 if is_lacking else 0, False, False


def unused_numbers(rules: PointsRules, state: PointsState) -> Counter[str]:
    """Return a counter of the card numbers that the formula has not used yet."""
    return Counter(str(rules.card_number(card)) for card in state.cards) - Counter(state.formula)


def makes_target(rules: PointsRules, state: PointsState) -> bool:
    """Return True if the formula equals the target and uses all cards."""
    worth = (evaluate_as_python if rules.is_legacy else evaluate)(state.formula)
    return worth == rules.target and not unused_numbers(rules, state)


def deal_pair(rules: PointsRules, rng: np.random.Generator) -> tuple[Card, ...]:
    """Return two random cards whose sum or product equals the target.

    The rank of one card is drawn uniformly from the ranks in 2..K for which `find_partner_numbers`
    finds at least one number. The rank of the other card is drawn uniformly from the numbers that
    `find_partner_numbers` returns. The order of the cards is random.
    """
    choices = ()
    while not choices:  # repeats only if the target is not 12, because some ranks then have no partner
        first = int(rng.integers(2, 14))
        choices = find_partner_numbers(rules.target, min(first, 10))
    ranks = [first, choices[rng.integers(len(choices))]]
    if rng.integers(2):
        ranks.reverse()
    return add_suits(ranks, rng)


def deal_four(rng: np.random.Generator) -> tuple[Card, ...]:
    """Return four random cards with independent, uniformly distributed ranks."""
    return add_suits(rng.integers(1, 14, size=4).tolist(), rng)


def add_suits(ranks: Sequence[int], rng: np.random.Generator) -> tuple[Card, ...]:
    """Return cards with the given ranks and random suits."""
    return tuple(Card(rank, SUITS[suit]) for rank, suit in zip(ranks, rng.integers(4, size=len(ranks)).tolist(), strict=True))


@lru_cache(maxsize=128)
def draw_state(rules: PointsRules, state: PointsState, style: CardStyle = ("large", 1.0)) -> Image.Image:
    """Return the RGB image of a state, 300 x 300 pixels.

    The image is cached and shared by all turns in this state: do not modify it.
    """
    drawn = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), BACKGROUND_COLOR)
    width = int(IMAGE_SIZE / rules.num_cards * 0.9)
    card_height = width * 7 // 5
    for number, card in enumerate(state.cards):
        paste_card(drawn, card, (int(5 + number * 1.1 * width), (IMAGE_SIZE - card_height) // 2), size=(width, card_height), style=style)
    pen = ImageDraw.Draw(drawn)
    lines = {rules.label_height: "Formula: "}
    lines[rules.formula_height] = lines.get(rules.formula_height, "") + state.formula_text
    for height, text in lines.items():
        pen.text((10, height * IMAGE_SIZE), text, fill="white", font=load_font(rules.font_size))
    return drawn


class PointsGame(gymnasium.Env[NDArray[np.uint8], int]):
    """Base class of the games EZPoints and Points24.

    Calling `reset(options={"cards": ["2H", "KS"]})` sets the hand. Without options, the hand is
    random. An observation is a uint8 array of shape [300, 300, 3].
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 1}
    action_space: gymnasium.spaces.Discrete

    def __init__(self, rules: PointsRules, *, style: CardStyle = ("large", 1.0), render_mode: str | None = None) -> None:
        self.rules, self.style, self.render_mode = rules, style, render_mode
        self.action_space = gymnasium.spaces.Discrete(len(rules.tokens))
        self.state: PointsState | None = None

    @cached_property
    def observation_space(self) -> gymnasium.Space[NDArray[np.uint8]]:
        """Space of image observations."""
        return pixels_space()

    def deal_hand(self) -> tuple[Card, ...]:
        """Return a random hand."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[NDArray[np.uint8], dict[str, object]]:
        """Start an episode and return the observation and the info dict."""
        super().reset(seed=seed)
        self.state = PointsState(_read_fixed_hand(self.rules, options) if options else self.deal_hand())
        return self.render(), self._info()

    def step(self, action: int) -> tuple[NDArray[np.uint8], int, bool, bool, dict[str, object]]:
        """Apply an action and return gymnasium's step tuple."""
        assert self.state is not None, "step before reset"
        require(
            self.action_space.contains(action),
            "action",
            action,
            f"use an index in 0..{len(self.rules.tokens) - 1}; the tokens are {' '.join(self.rules.tokens)}",
        )
        self.state, reward, terminated, truncated = apply_action(self.rules, self.state, int(action))
        return self.render(), reward, terminated, truncated, self._info()

    def render(self) -> NDArray[np.uint8]:
        """Return the observation as a new array."""
        assert self.state is not None, "render before reset"
        return np.array(draw_state(self.rules, self.state, self.style))

    def _info(self) -> dict[str, object]:
        assert self.state is not None
        cards = self.state.cards
        return {
            "Cards": [str(card) for card in cards], "Numbers": [self.rules.card_number(card) for card in cards],
            "Formula": [*self.state.formula],
        }  # fmt: skip


class EZPoints(PointsGame):
    """`gym_cards/EZPoints-v0`: make 12 from two cards with + or *."""

    def __init__(
        self, *, target: int = 12, legacy_rules: bool = False, style: CardStyle = ("large", 1.0), render_mode: str | None = None
    ) -> None:  # fmt: skip
        can_deal = any(find_partner_numbers(target, number) for number in range(2, 11))
        require(can_deal, "target", target, "cannot be made with + or * from a card in 2..K and a card in A..10")
        super().__init__(replace(EZPOINTS, target=target, is_legacy=legacy_rules), style=style, render_mode=render_mode)

    def deal_hand(self) -> tuple[Card, ...]:
        """Return a random hand with a sum or product that equals the target."""
        return deal_pair(self.rules, self.np_random)


class Points24(PointsGame):
    """`gym_cards/Points24-v0`: make 24 from four cards with + - * / and parentheses.

    With solvable=True, only hands that have a solution are dealt.
    """

    def __init__(
        self, *, target: int = 24, faces: str = "ten", solvable: bool = False, legacy_rules: bool = False,
        style: CardStyle = ("large", 1.0), render_mode: str | None = None,
    ) -> None:  # fmt: skip
        require(target in range(1, 101), "target", target, "must be in 1..100")
        tokens = POINTS24.tokens if faces == "ten" else RANK_TOKENS
        rules = replace(POINTS24, target=target, is_legacy=legacy_rules, tokens=tokens, faces_are_ten=faces == "ten")
        super().__init__(rules, style=style, render_mode=render_mode)
        self.solvable = solvable

    def deal_hand(self) -> tuple[Card, ...]:
        """Return a random hand."""
        while True:
            cards = deal_four(self.np_random)
            if not self.solvable or find_solution(tuple(map(self.rules.card_number, cards)), self.rules.target):
                return cards


def _read_fixed_hand(rules: PointsRules, options: Mapping[str, object]) -> tuple[Card, ...]:
    names = options.get("cards")
    remedy = f"must contain only the key cards with a list of {rules.num_cards} cards"
    require(
        options.keys() == {"cards"} and isinstance(names, list | tuple) and len(names) == rules.num_cards, "options", dict(options), remedy
    )
    assert isinstance(names, list | tuple)
    return tuple(map(Card.from_name, names))
