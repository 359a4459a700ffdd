"""Canvases for visual search: small things with labels that can be read only in a crop.

A canvas is a grid of cells, a thing lies inside one cell, and its label stands on a white plate in its middle. The ground is tinted, redder
to the left and bluer to the top, so that a piece of it tells where it lies: a small vision tower without absolute positions needs that.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.Image import Image as Picture

from megatron_rl.config import require
from megatron_rl.tasks.gym_cards.number_line import FONT_FILE

Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels; the last two are the first outside."""
COLORS = {
    "red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 80, 220),
    "yellow": (240, 200, 20), "purple": (140, 60, 180), "black": (20, 20, 20),
    "orange": (245, 125, 20), "pink": (245, 130, 190), "gray": (120, 120, 120), "brown": (120, 70, 30),
}  # fmt: skip
SHAPES = ("disc", "square", "diamond", "triangle")
TINT = 120
"""How much red the right edge, and blue the lower edge, lack."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Level:
    """How hard a canvas is to search."""

    cells: int
    """A side of the grid."""
    cell: int
    """A side of a cell in pixels."""
    things: int
    """On a canvas, the one that is asked for included."""
    thing: float
    """A thing's side, as a share of its cell's."""
    plate: float
    """A label's plate, as a share of its thing's side."""
    label: float
    """A label's font size, as a share of the cell's side."""
    jitter: float = 0.0
    """How far a thing lies from the middle of its cell at most, as a share of the cell's side."""
    label_length: int = 1

    def __post_init__(self) -> None:
        require(2 <= self.things <= self.cells**2, "things", self.things, f"must be at least 2, and there are {self.cells**2} cells")
        require(self.thing / 2 + self.jitter <= 0.5, "thing", self.thing, f"does not stay in its cell with a jitter of {self.jitter}")
        require(self.label * self.label_length <= self.thing * self.plate, "label", self.label, "does not fit on its plate")

    @property
    def side(self) -> int:
        """Of the canvas, in pixels."""
        return self.cells * self.cell


LEVELS = {
    "easy": Level(cells=5, cell=100, things=4, thing=0.8, plate=0.5, label=0.2, jitter=0.05),
    "medium": Level(cells=10, cell=120, things=12, thing=0.6, plate=0.35, label=0.12, jitter=0.15),
    "hard": Level(cells=20, cell=120, things=40, thing=0.4, plate=0.5, label=0.09, jitter=0.3, label_length=2),
}
LABELS = "0123456789"


Sprites = Mapping[str, Picture]
"""What things look like, by what they are called: square pictures with transparency."""


@dataclass(slots=True, frozen=True)
class Thing:
    name: str
    cell: Box
    middle: tuple[int, int]
    label: str


@dataclass(slots=True, frozen=True)
class Scene:
    """What is on a canvas. The first thing is the one that is asked for; no name is there twice."""

    level: Level
    things: tuple[Thing, ...]

    @property
    def target(self) -> Thing:
        return self.things[0]

    @property
    def question(self) -> str:
        return f"What is written on the {self.target.name}?"

    def draw(self, sprites: Sprites) -> Picture:
        """The canvas, RGB."""
        canvas = ground(self.level.side).copy()
        for thing in self.things:
            _paste(canvas, thing, sprites[thing.name], self.level)
        return canvas


def scene(level: Level, names: Sequence[str], *, seed: str, labels: str = LABELS) -> Scene:
    """The scene of a seed: as many different names as the level has things, each in a cell of its own, labels drawn one by one."""
    require(len(names) >= level.things, "things", level.things, f"is more than the {len(names)} kinds of thing; choose an easier level")
    dice = random.Random(seed)
    things = []
    for name, cell in zip(dice.sample(names, level.things), dice.sample(range(level.cells**2), level.things), strict=True):
        row, column = divmod(cell, level.cells)
        left, top = column * level.cell, row * level.cell
        reach = round(level.jitter * level.cell)
        middle = (left + level.cell // 2 + dice.randint(-reach, reach), top + level.cell // 2 + dice.randint(-reach, reach))
        label = "".join(dice.choices(labels, k=level.label_length))
        things.append(Thing(name, (left, top, left + level.cell, top + level.cell), middle, label))
    return Scene(level, tuple(things))


@cache
def shapes(kinds: tuple[str, ...], *, colors: tuple[str, ...] = tuple(COLORS)) -> Sprites:
    """Each kind of shape in each color, 256 x 256 pixels that the shape fills, e.g. `red disc`."""
    outlines = {
        "square": ((0, 0), (255, 0), (255, 255), (0, 255)),
        "diamond": ((128, 0), (255, 128), (128, 255), (0, 128)),
        "triangle": ((128, 0), (255, 255), (0, 255)),
    }
    drawn = {}
    for kind in kinds:
        for color in colors:
            picture = Image.new("RGBA", (256, 256))
            pen = ImageDraw.Draw(picture)
            if kind == "disc":
                pen.ellipse((0, 0, 255, 255), fill=COLORS[color])
            else:
                pen.polygon(outlines[kind], fill=COLORS[color])
            drawn[f"{color} {kind}"] = picture
    return drawn


def _paste(canvas: Picture, thing: Thing, sprite: Picture, level: Level) -> None:
    """The thing around its middle, its label in black on a white plate."""
    side, (x, y) = round(level.thing * level.cell), thing.middle
    resized = sprite.resize((side, side), Image.Resampling.LANCZOS)
    canvas.paste(resized, (x - side // 2, y - side // 2), resized)
    pen = ImageDraw.Draw(canvas)
    reach = round(level.plate * side / 2)
    pen.ellipse((x - reach, y - reach, x + reach, y + reach), fill="white")
    pen.text((x, y), thing.label, fill="black", font=_font(round(level.label * level.cell)), anchor="mm")


@cache
def ground(side: int) -> Picture:
    """The empty canvas. Shared: to be copied before it is drawn on."""
    pixels = np.full((side, side, 3), 255, np.uint8)
    fall = np.linspace(0, TINT, side).round().astype(np.uint8)
    pixels[:, :, 0] -= fall[None, :]
    pixels[:, :, 2] -= fall[:, None]
    return Image.fromarray(pixels)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(FONT_FILE, size, layout_engine=ImageFont.Layout.BASIC)
