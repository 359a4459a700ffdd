"""Playing cards and their images, drawn with the font file in this package.

Policies are trained on the card art "large"; the card arts "classic" and "night" are used to test
generalization. The card art "large" uses a different ink color for each suit, so that suits can be
distinguished on cards that are 30 pixels wide.
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
    """Playing card."""

    rank: int
    """Rank from 1 (ace) to 13 (king)."""
    suit: str
    """Suit, one of SUITS."""

    @classmethod
    def from_name(cls, name: object) -> Self:
        """Parse a card name, e.g. 10H for the ten of hearts.

        Raises:
            ValueError: The name is not a rank followed by a suit.
        """
        known = isinstance(name, str) and name[:-1] in RANKS and name[-1] in SUITS
        require(known, "card", name, "use a rank followed by a suit, e.g. AS, 10H, KD or 3C")
        assert isinstance(name, str)
        return cls(RANKS.index(name[:-1]) + 1, name[-1])

    def __str__(self) -> str:
        return self.symbol + self.suit

    @property
    def symbol(self) -> str:
        """Rank as printed on the card: a number from 2 to 10, or A, J, Q or K."""
        return RANKS[self.rank - 1]

    @property
    def value(self) -> int:
        """Value of the card, which is 10 for J, Q and K and equals the rank for all other cards."""
        return min(self.rank, 10)


DECK = tuple(Card(rank, suit) for suit in SUITS for rank in range(1, 14))


@dataclass(slots=True, frozen=True, kw_only=True)
class CardArt:
    """Visual style of cards."""

    paper: str
    ink: dict[str, str]
    """Maps each suit to its ink color."""
    is_large: bool
    """If True, the rank is drawn above the suit, and both symbols are as large as possible. If
    False, the rank is drawn in two corners and the suit in the middle.
    """


CARD_ARTS = {
    "large": CardArt(paper="white", ink={"S": "#000000", "H": "#d00000", "D": "#0050e0", "C": "#008030"}, is_large=True),
    "classic": CardArt(paper="#fffdf0", ink={"S": "#000000", "H": "#d00000", "D": "#d00000", "C": "#000000"}, is_large=False),
    "night": CardArt(paper="#202830", ink={"S": "#f0f0f0", "H": "#ff7060", "D": "#60b0ff", "C": "#60e090"}, is_large=True),
}


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """Return the package's font at the given size.

    The font uses Pillow's basic text layout, which produces identical images on every machine (see
    number_line.draw_state).
    """
    return ImageFont.truetype(FONT_FILE, size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=1024)
def render_card(card: Card | None, *, width: int, height: int, art: str = "large") -> Image.Image:
    """Return the RGB image of a card, or of the back of a card if `card` is None.

    The image is cached and shared: do not modify it.
    """
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
    """Draw a card into a box of the canvas.

    Args:
        canvas: Image to draw on.
        card: Card, or None for the back of a card.
        box_corner: Upper left corner of the box.
        size: Width and height of the box.
        style: Name of the card art, and the size of the card as a fraction of the box.
    """
    art, scale = style
    width, height = round(size[0] * scale), round(size[1] * scale)
    corner = box_corner[0] + (size[0] - width) // 2, box_corner[1] + (size[1] - height) // 2
    canvas.paste(render_card(card, width=width, height=height, art=art), corner)


def is_held_out_drawing(cards: Sequence[Card]) -> bool:
    """Return True if a hand with these suits is reserved for evaluation.

    Exactly one quarter of all suit combinations is reserved.
    """
    return sum(SUITS.index(card.suit) for card in cards) % 4 == 0
