"""Canvases for visual search: small objects with labels that are legible only in a crop.

A canvas is a grid of cells. Each object lies inside one cell. A white plate with a label covers the
object's center. The background is tinted: red fades from left to right and blue from top to bottom,
so the background color of a patch encodes the patch's position. A small vision tower without
absolute position embeddings needs this position information to locate objects.
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
"""(left, top, right, bottom) in pixels; right and bottom are exclusive."""
COLORS = {
    "red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 80, 220),
    "yellow": (240, 200, 20), "purple": (140, 60, 180), "black": (20, 20, 20),
    "orange": (245, 125, 20), "pink": (245, 130, 190), "gray": (120, 120, 120), "brown": (120, 70, 30),
}  # fmt: skip
SHAPES = ("disc", "square", "diamond", "triangle")
MAX_TINT = 120
"""Amount by which the red channel is reduced at the right edge and the blue channel is reduced at
the bottom edge, on a scale of 0 to 255.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class SearchLevel:
    """Difficulty level of visual search: the layout of the canvas and the sizes of the objects."""

    grid_side: int
    """Number of cells along each side of the grid."""
    cell_px: int
    """Side length of a cell in pixels."""
    num_objects: int
    """Number of objects on the canvas, including the target."""
    object_scale: float
    """Side length of an object, as a fraction of the cell's side."""
    plate_scale: float
    """Diameter of the plate behind a label, as a fraction of the object's side."""
    label_scale: float
    """Font size of a label, as a fraction of the cell's side."""
    jitter: float = 0.0
    """Maximum offset of an object from the center of its cell, as a fraction of the cell's side."""
    label_length: int = 1

    def __post_init__(self) -> None:
        require(
            2 <= self.num_objects <= self.grid_side**2,
            "things",
            self.num_objects,
            f"must be at least 2 and at most {self.grid_side**2} (number of cells)",
        )
        require(
            self.object_scale / 2 + self.jitter <= 0.5,
            "thing",
            self.object_scale,
            f"is too large: with a jitter of {self.jitter}, an object can extend beyond its cell",
        )
        require(
            self.label_scale * self.label_length <= self.object_scale * self.plate_scale,
            "label",
            self.label_scale,
            "is too large: a label does not fit on its plate",
        )

    @property
    def canvas_px(self) -> int:
        """Side length of the canvas in pixels."""
        return self.grid_side * self.cell_px


SEARCH_LEVELS = {
    "easy": SearchLevel(grid_side=5, cell_px=100, num_objects=4, object_scale=0.8, plate_scale=0.5, label_scale=0.2, jitter=0.05),
    "medium": SearchLevel(grid_side=10, cell_px=120, num_objects=12, object_scale=0.6, plate_scale=0.35, label_scale=0.12, jitter=0.15),
    "hard": SearchLevel(
        grid_side=20, cell_px=120, num_objects=40, object_scale=0.4, plate_scale=0.5, label_scale=0.09, jitter=0.3, label_length=2
    ),
}
LABELS = "0123456789"


Sprites = Mapping[str, Picture]
"""Maps object names to square images with transparency."""


@dataclass(slots=True, frozen=True)
class SceneObject:
    """Object on a canvas, with its cell, its center in pixels and its label."""

    name: str
    cell: Box
    center: tuple[int, int]
    label: str


@dataclass(slots=True, frozen=True)
class SearchScene:
    """Objects on a canvas, with unique names. The first object is the target."""

    level: SearchLevel
    objects: tuple[SceneObject, ...]

    @property
    def target(self) -> SceneObject:
        """Object that the question asks about."""
        return self.objects[0]

    @property
    def question(self) -> str:
        """Question about the target's label."""
        return f"What is written on the {self.target.name}?"

    def draw(self, sprites: Sprites) -> Picture:
        """Draw the canvas as an RGB image."""
        canvas = draw_background(self.level.canvas_px).copy()
        for thing in self.objects:
            _paste_object(canvas, thing, sprites[thing.name], self.level)
        return canvas


def make_scene(level: SearchLevel, names: Sequence[str], *, seed: str, labels: str = LABELS) -> SearchScene:
    """Return a random scene that depends only on the seed and the other arguments.

    The scene has `level.num_objects` objects with distinct names in distinct cells. Each character
    of a label is sampled independently.

    Raises:
        ValueError: There are fewer names than objects.
    """
    require(
        len(names) >= level.num_objects,
        "things",
        level.num_objects,
        f"exceeds the {len(names)} available object names; choose an easier level",
    )
    dice = random.Random(seed)
    things = []
    for name, cell in zip(dice.sample(names, level.num_objects), dice.sample(range(level.grid_side**2), level.num_objects), strict=True):
        row, column = divmod(cell, level.grid_side)
        left, top = column * level.cell_px, row * level.cell_px
        reach = round(level.jitter * level.cell_px)
        middle = (left + level.cell_px // 2 + dice.randint(-reach, reach), top + level.cell_px // 2 + dice.randint(-reach, reach))
        label = "".join(dice.choices(labels, k=level.label_length))
        things.append(SceneObject(name, (left, top, left + level.cell_px, top + level.cell_px), middle, label))
    return SearchScene(level, tuple(things))


@cache
def draw_shapes(kinds: tuple[str, ...], *, colors: tuple[str, ...] = tuple(COLORS)) -> Sprites:
    """Draw a sprite of 256 x 256 pixels for each combination of shape and color.

    A sprite has a name such as `red disc`, which consists of the color and the shape.
    """
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


def _paste_object(canvas: Picture, thing: SceneObject, sprite: Picture, level: SearchLevel) -> None:
    """Draw an object at its position, with its label in black on a white plate."""
    side, (x, y) = round(level.object_scale * level.cell_px), thing.center
    resized = sprite.resize((side, side), Image.Resampling.LANCZOS)
    canvas.paste(resized, (x - side // 2, y - side // 2), resized)
    pen = ImageDraw.Draw(canvas)
    reach = round(level.plate_scale * side / 2)
    pen.ellipse((x - reach, y - reach, x + reach, y + reach), fill="white")
    pen.text((x, y), thing.label, fill="black", font=_load_font(round(level.label_scale * level.cell_px)), anchor="mm")


@cache
def draw_background(side_px: int) -> Picture:
    """Return the tinted background of a canvas.

    The image is cached and shared: copy it before drawing on it.
    """
    pixels = np.full((side_px, side_px, 3), 255, np.uint8)
    fall = np.linspace(0, MAX_TINT, side_px).round().astype(np.uint8)
    pixels[:, :, 0] -= fall[None, :]
    pixels[:, :, 2] -= fall[:, None]
    return Image.fromarray(pixels)


@cache
def _load_font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(FONT_FILE, size, layout_engine=ImageFont.Layout.BASIC)
