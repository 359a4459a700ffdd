"""Pictures of plain geometry, each with a question about it.

The kinds are three of VLMs Are Blind (Rahmanzadehgervi et al. 2024, arXiv:2407.06581). Code,
questions and sizes are this project's own. Lengths are fractions of the picture's side. Two lines
that do not cross are at least 0.7 line widths apart, so that they are distinguishable at 112
pixels.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from PIL import Image, ImageDraw
from PIL.Image import Image as Picture

OVERSAMPLING = 4
"""Factor by which a picture is drawn larger and then reduced, so that edges are smooth."""
JITTER = 0.015
"""Largest distance between the centers of drawing and picture, in each direction."""
MARGIN = 0.03
"""Smallest distance of a grid from the edge of the picture."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Style:
    """Colors, line widths and sizes of a split."""

    colors: tuple[str, ...] = ("#1f4fbf", "#c02020", "#157a2e", "#7b2d9e")
    """Colors of lines. The two circles of a picture have different colors."""
    widths: tuple[float, float] = (0.034, 0.04)
    """Range of the line width."""
    sizes: tuple[float, float] = (0.9, 1.0)
    """Range of the size of a drawing, as a fraction of its largest size."""


TRAINED = Style()
SHIFTS: Mapping[str, Style] = {
    "color": replace(TRAINED, colors=("#d97400", "#008b8b", "#444444", "#d1479b")),
    "width": replace(TRAINED, widths=(0.046, 0.05)),
    "size": replace(TRAINED, sizes=(0.75, 0.85)),
}
"""Styles that training does not have, keyed by the property that differs."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Scene:
    """Shapes of one picture, measured to the middle of their lines, with a question."""

    question: str
    width: float
    """Line width."""
    boxes: tuple[tuple[str, float, float, float, float], ...] = ()
    """Color, left, top, right and bottom of each rectangle."""
    circles: tuple[tuple[str, float, float, float], ...] = ()
    """Color, center and radius of each circle."""

    def draw(self, side: int) -> Picture:
        """Draw the scene on a white picture of `side` x `side` pixels."""
        size = side * OVERSAMPLING
        picture, line, half = Image.new("RGB", (size, size), "white"), round(self.width * size), self.width / 2
        pen = ImageDraw.Draw(picture)
        for color, left, top, right, bottom in self.boxes:
            corners = (left - half, top - half, right + half, bottom + half)
            pen.rectangle([size * place for place in corners], outline=color, width=line)
        for color, x, y, radius in self.circles:
            outer = radius + half
            corners = (x - outer, y - outer, x + outer, y + outer)
            pen.ellipse([size * place for place in corners], outline=color, width=line)
        return picture.resize((side, side), Image.Resampling.BOX)


def make_grid(answer: str, style: Style, dice: random.Random) -> Scene:
    """Return a grid with 2 to 4 columns; the answer is its number of rows."""
    color, width, rows, columns = dice.choice(style.colors), dice.uniform(*style.widths), int(answer), dice.randint(2, 4)
    wide, tall = ((1 - 2 * MARGIN) * dice.uniform(*style.sizes) for _ in range(2))
    left, top = dice.uniform(MARGIN, 1 - MARGIN - wide), dice.uniform(MARGIN, 1 - MARGIN - tall)
    xs, ys = [left + wide * i / columns for i in range(columns + 1)], [top + tall * i / rows for i in range(rows + 1)]
    boxes = [(color, xs[i], ys[j], xs[i + 1], ys[j + 1]) for j in range(rows) for i in range(columns)]
    return Scene(question="How many rows does the grid have?", width=width, boxes=tuple(boxes))


def make_nested_squares(answer: str, style: Style, dice: random.Random) -> Scene:
    """Return squares inside of each other; the answer is their number."""
    color, width = dice.choice(style.colors), dice.uniform(*style.widths)
    half = 0.46 * dice.uniform(*style.sizes) - width / 2
    x, y = (0.5 + dice.uniform(-JITTER, JITTER) for _ in range(2))
    boxes = []
    for _ in range(int(answer)):
        boxes.append((color, x - half, y - half, x + half, y + half))
        half -= width * dice.uniform(1.9, 2.1)
        x, y = (place + width * dice.uniform(-0.2, 0.2) for place in (x, y))
    return Scene(question="How many squares are in the picture?", width=width, boxes=tuple(boxes))


def make_touching_circles(answer: str, style: Style, dice: random.Random) -> Scene:
    """Return two circles of equal size; the answer is whether they overlap."""
    colors, width, radius = dice.sample(style.colors, 2), dice.uniform(*style.widths), 0.18 * dice.uniform(*style.sizes)
    gap = radius * dice.uniform(0.3, 0.7) * (1 if answer == "No" else -1)
    angle, half = dice.uniform(0, math.pi), radius + width / 2 + gap / 2
    x, y = (0.5 + dice.uniform(-JITTER, JITTER) for _ in range(2))
    placed = zip(colors, (-half, half), strict=True)
    circles = [(color, x + distance * math.cos(angle), y + distance * math.sin(angle), radius) for color, distance in placed]
    return Scene(question="Do the two circles touch?", width=width, circles=tuple(circles))


@dataclass(slots=True, frozen=True)
class Kind:
    """A kind of pictures with its answers."""

    task: str
    """Name in the column `task` of VLMs Are Blind."""
    make_scene: Callable[[str, Style, random.Random], Scene]
    answers: tuple[str, ...]
    unseen_answers: tuple[str, ...] = ()
    """Answers that no training picture has."""


KINDS: Mapping[str, Kind] = {
    "grid": Kind("Counting Grid", make_grid, ("2", "3", "4"), ("5",)),
    "nested_squares": Kind("Nested Squares", make_nested_squares, ("2", "3", "4"), ("5",)),
    "touching_circles": Kind("Touching Circles", make_touching_circles, ("Yes", "No")),
}
