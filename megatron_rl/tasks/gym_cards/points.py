"""EZPoints and Points24 of GymCards: make a number from all the cards of a hand, writing a formula token by token.

The rules are RL4VLM's (arXiv 2405.10292): a number that no card is left for pays -1 and appends a blank; "=" ends the game and pays 10 if
the formula makes the target from all cards, else -1; when the formula is longer than its limit, whatever is played pays -1 and the episode
is truncated; all else pays 0. Differences: randomness is the environment's own, and a formula is read strictly unless legacy_rules=True.
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
from megatron_rl.tasks.gym_cards.cards import SUITS, Card, font, paste
from megatron_rl.tasks.gym_cards.expressions import evaluate, evaluate_as_python
from megatron_rl.tasks.gym_cards.number_line import IMAGE_SIZE, pixels_space
from megatron_rl.tasks.gym_cards.solvers import pairs_to_make, solution

FELT = "#35654d"
BLANK = " "
NUMBERS = tuple(str(number) for number in range(1, 11))
Look = tuple[str, float]
"""A card's art, and its size as a share of the usual one."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Rules:
    """What the two games differ in."""

    tokens: tuple[str, ...]
    """By action."""
    num_cards: int
    target: int
    max_entries: int
    """Of a formula; a longer one truncates the episode."""
    label_at: float
    """Height of the formula's label, as a share of the picture's. The same as the formula's: both are one line."""
    formula_at: float
    font_size: int
    faces_are_ten: bool = True
    is_legacy: bool = False

    @property
    def max_steps(self) -> int:
        """The step that truncates."""
        return self.max_entries + 2

    def number(self, card: Card) -> int:
        return card.value if self.faces_are_ten else card.rank


EZPOINTS = Rules(
    tokens=(*NUMBERS, "+", "*", "="), num_cards=2, target=12, max_entries=5, label_at=0.86, formula_at=0.86, font_size=20
)  # fmt: skip
POINTS24 = Rules(
    tokens=(*NUMBERS, "+", "-", "*", "/", "(", ")", "="), num_cards=4, target=24, max_entries=20,
    label_at=0.70, formula_at=0.80, font_size=16,
)  # fmt: skip
RANK_TOKENS = (*NUMBERS, "11", "12", "13", *POINTS24.tokens[10:])


@dataclass(slots=True, frozen=True)
class Table:
    """The state: the cards, and the formula so far."""

    cards: tuple[Card, ...]
    formula: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.formula)


def move(rules: Rules, table: Table, action: int) -> tuple[Table, int, bool, bool]:
    """The next state, the reward, and whether the episode is terminated, or truncated."""
    if len(table.formula) > rules.max_entries:
        return table, -1, False, True
    token = rules.tokens[action]
    if token == "=":
        return table, 10 if makes_target(rules, table) else -1, True, False
    is_lacking = token.isdigit() and not unused(rules, table)[token]
    return replace(table, formula=(*table.formula, BLANK if is_lacking else token)), -1 if is_lacking else 0, False, False


def unused(rules: Rules, table: Table) -> Counter[str]:
    """The numbers of the cards that the formula has not used yet."""
    return Counter(str(rules.number(card)) for card in table.cards) - Counter(table.formula)


def makes_target(rules: Rules, table: Table) -> bool:
    worth = (evaluate_as_python if rules.is_legacy else evaluate)(table.formula)
    return worth == rules.target and not unused(rules, table)


def deal_pair(rules: Rules, dice: np.random.Generator) -> tuple[Card, ...]:
    """Two cards that make the target by one + or *: the first of 2..K, the second by a toss where both ways are open, order by another."""
    choices = ()
    while not choices:  # of target 12 every first card has a partner
        first = int(dice.integers(2, 14))
        choices = pairs_to_make(rules.target, min(first, 10))
    ranks = [first, choices[dice.integers(len(choices))]]
    if dice.integers(2):
        ranks.reverse()
    return suited(ranks, dice)


def deal_four(dice: np.random.Generator) -> tuple[Card, ...]:
    """Every rank is as likely as any other on each card."""
    return suited(dice.integers(1, 14, size=4).tolist(), dice)


def suited(ranks: Sequence[int], dice: np.random.Generator) -> tuple[Card, ...]:
    return tuple(Card(rank, SUITS[suit]) for rank, suit in zip(ranks, dice.integers(4, size=len(ranks)).tolist(), strict=True))


@lru_cache(maxsize=128)
def picture(rules: Rules, table: Table, look: Look = ("large", 1.0)) -> Image.Image:
    """The RGB picture of a state, 300 x 300. Shared by every turn that shows it: not to be changed."""
    drawn = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), FELT)
    width = int(IMAGE_SIZE / rules.num_cards * 0.9)
    card_height = width * 7 // 5
    for number, card in enumerate(table.cards):
        paste(drawn, card, (int(5 + number * 1.1 * width), (IMAGE_SIZE - card_height) // 2), size=(width, card_height), look=look)
    pen = ImageDraw.Draw(drawn)
    lines = {rules.label_at: "Formula: "}
    lines[rules.formula_at] = lines.get(rules.formula_at, "") + table.text
    for height, text in lines.items():
        pen.text((10, height * IMAGE_SIZE), text, fill="white", font=font(rules.font_size))
    return drawn


class Points(gymnasium.Env[NDArray[np.uint8], int]):
    """What both games are. Observations are uint8 [300, 300, 3]; reset(options={"cards": ["2H", "KS"]}) fixes the hand."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 1}

    def __init__(self, rules: Rules, *, look: Look = ("large", 1.0), render_mode: str | None = None) -> None:
        self.rules, self.look, self.render_mode = rules, look, render_mode
        self.action_space = gymnasium.spaces.Discrete(len(rules.tokens))
        self.table: Table | None = None

    @cached_property
    def observation_space(self) -> gymnasium.Space[NDArray[np.uint8]]:
        return pixels_space()

    def deal(self) -> tuple[Card, ...]:
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[NDArray[np.uint8], dict[str, object]]:
        super().reset(seed=seed)
        self.table = Table(_fixed_hand(self.rules, options) if options else self.deal())
        return self.render(), self._info()

    def step(self, action: int) -> tuple[NDArray[np.uint8], int, bool, bool, dict[str, object]]:
        assert self.table is not None, "step before reset"
        require(self.action_space.contains(action), "action", action, f"use 0..{len(self.rules.tokens) - 1}: {' '.join(self.rules.tokens)}")
        self.table, reward, terminated, truncated = move(self.rules, self.table, int(action))
        return self.render(), reward, terminated, truncated, self._info()

    def render(self) -> NDArray[np.uint8]:
        """The observation, as an array of the caller's own."""
        assert self.table is not None, "render before reset"
        return np.array(picture(self.rules, self.table, self.look))

    def _info(self) -> dict[str, object]:
        assert self.table is not None
        cards = self.table.cards
        return {
            "Cards": [str(card) for card in cards], "Numbers": [self.rules.number(card) for card in cards],
            "Formula": [*self.table.formula],
        }  # fmt: skip


class EZPoints(Points):
    """`gym_cards/EZPoints-v0`: 12 from two cards by + or *."""

    def __init__(
        self, *, target: int = 12, legacy_rules: bool = False, look: Look = ("large", 1.0), render_mode: str | None = None
    ) -> None:  # fmt: skip
        can_deal = any(pairs_to_make(target, number) for number in range(2, 11))
        require(can_deal, "target", target, "no two cards of 2..K and A..10 make it by + or *")
        super().__init__(replace(EZPOINTS, target=target, is_legacy=legacy_rules), look=look, render_mode=render_mode)

    def deal(self) -> tuple[Card, ...]:
        return deal_pair(self.rules, self.np_random)


class Points24(Points):
    """`gym_cards/Points24-v0`: 24 from four cards by + - * / and parentheses. solvable=True deals only hands that have a solution."""

    def __init__(
        self, *, target: int = 24, faces: str = "ten", solvable: bool = False, legacy_rules: bool = False,
        look: Look = ("large", 1.0), render_mode: str | None = None,
    ) -> None:  # fmt: skip
        require(target in range(1, 101), "target", target, "must be in 1..100")
        tokens = POINTS24.tokens if faces == "ten" else RANK_TOKENS
        rules = replace(POINTS24, target=target, is_legacy=legacy_rules, tokens=tokens, faces_are_ten=faces == "ten")
        super().__init__(rules, look=look, render_mode=render_mode)
        self.solvable = solvable

    def deal(self) -> tuple[Card, ...]:
        while True:
            cards = deal_four(self.np_random)
            if not self.solvable or solution(tuple(map(self.rules.number, cards)), self.rules.target):
                return cards


def _fixed_hand(rules: Rules, options: Mapping[str, object]) -> tuple[Card, ...]:
    names = options.get("cards")
    remedy = f"give cards, a list of {rules.num_cards}, and nothing else"
    require(
        options.keys() == {"cards"} and isinstance(names, list | tuple) and len(names) == rules.num_cards, "options", dict(options), remedy
    )
    return tuple(map(Card.named, names))
