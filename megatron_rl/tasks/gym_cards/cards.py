"""Playing cards, drawn with the fonts of this package. Policies are trained on the art "large"; two more test how far they see.

A deck has four colors of ink in the art "large", so that suits are told apart where a card is thirty pixels wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Self

from PIL import Image, ImageDraw, ImageFont

from megatron_rl.config import require
from megatron_rl.tasks.gym_cards.number_line import FONT_FILE

RANKS = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
SUITS = "SHDC"
GLYPHS = {"S": "\u2660", "H": "\u2665", "D": "\u2666", "C": "\u2663"}


@dataclass(slots=True, frozen=True)
class Card:
    rank: int
    """1 is the ace, 11 to 13 are J, Q and K."""
    suit: str
    """One of SUITS."""

    @classmethod
    def from_name(cls, name: object) -> Self:
        """Example: 10H is the ten of hearts."""
        known = isinstance(name, str) and name[:-1] in RANKS and name[-1] in SUITS
        require(known, "card", name, "use a rank and a suit, as AS, 10H, KD or 3C")
        return cls(RANKS.index(name[:-1]) + 1, name[-1])

    def __str__(self) -> str:
        return self.symbol + self.suit

    @property
    def symbol(self) -> str:
        """What is written on it: A, 2, ..., 10, J, Q or K."""
        return RANKS[self.rank - 1]

    @property
    def value(self) -> int:
        """Faces count ten, the ace one."""
        return min(self.rank, 10)


DECK = tuple(Card(rank, suit) for suit in SUITS for rank in range(1, 14))


@dataclass(slots=True, frozen=True, kw_only=True)
class CardArt:
    paper: str
    ink: dict[str, str]
    """By suit."""
    is_large: bool
    """Rank above suit, as large as the card lets them be; otherwise the rank in two corners and the suit in the middle."""


CARD_ARTS = {
    "large": CardArt(paper="white", ink={"S": "#000000", "H": "#d00000", "D": "#0050e0", "C": "#008030"}, is_large=True),
    "classic": CardArt(paper="#fffdf0", ink={"S": "#000000", "H": "#d00000", "D": "#d00000", "C": "#000000"}, is_large=False),
    "night": CardArt(paper="#202830", ink={"S": "#f0f0f0", "H": "#ff7060", "D": "#60b0ff", "C": "#60e090"}, is_large=True),
}


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """The basic layout, so that a picture is the same on every machine (number_line.picture)."""
    return ImageFont.truetype(FONT_FILE, size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=1024)
def render_card(card: Card | None, *, width: int, height: int, art: str = "large") -> Image.Image:
    """RGB; None is a card's back. Shared: not to be changed."""
    style = CARD_ARTS[art]
    drawn = Image.new("RGB", (width, height), "#203a8c" if card is None else style.paper)
    pen = ImageDraw.Draw(drawn)
    if card is None:
        for offset in range(-height, width, max(width // 6, 3)):
            pen.line((offset, 0, offset + height, height), fill="#b0c0f0", width=max(width // 24, 1))
    elif style.is_large:
        middle, ink = width / 2, style.ink[card.suit]
        pen.text((middle, height * 0.29), card.symbol, fill=ink, font=load_font(round(width * 0.58)), anchor="mm")
        pen.text((middle, height * 0.72), GLYPHS[card.suit], fill=ink, font=load_font(round(width * 0.7)), anchor="mm")
    else:
        ink, size = style.ink[card.suit], round(width * 0.3)
        pen.text((width * 0.07, height * 0.03), card.symbol, fill=ink, font=load_font(size), anchor="lt")
        pen.text((width * 0.93, height * 0.97), card.symbol, fill=ink, font=load_font(size), anchor="rb")
        pen.text((width / 2, height / 2), GLYPHS[card.suit], fill=ink, font=load_font(round(width * 0.6)), anchor="mm")
    pen.rectangle((0, 0, width - 1, height - 1), outline="black")
    return drawn


def paste_card(
    canvas: Image.Image, card: Card | None, box_corner: tuple[int, int], *, size: tuple[int, int], style: tuple[str, float]
) -> None:
    """Draw a card into the box of this size at this place; a look is an art, and the share of the box that the card fills."""
    art, scale = style
    width, height = round(size[0] * scale), round(size[1] * scale)
    corner = box_corner[0] + (size[0] - width) // 2, box_corner[1] + (size[1] - height) // 2
    canvas.paste(render_card(card, width=width, height=height, art=art), corner)


def is_held_out_drawing(cards: Sequence[Card]) -> bool:
    """Whether these suits are for evaluation: exactly a quarter of all the ways to draw a hand of the same ranks."""
    return sum(SUITS.index(card.suit) for card in cards) % 4 == 0
