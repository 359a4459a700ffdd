"""The picture of a scene: its text observation, drawn. There is no simulator here; frames of THOR would be another `Look`."""

from collections.abc import Callable
from functools import cache, lru_cache

from PIL import Image, ImageDraw, ImageFont
from PIL.Image import Image as Picture

from megatron_rl.tasks.gym_cards.number_line import FONT_FILE

IMAGE_SIDE = 300
"""Pixels, as RL4VLM's frames."""
MARGIN = 8
FONT_SIZES = (44, 40, 36, 32, 28, 25, 22, 20, 18, 16, 14, 12, 10, 8)
SceneRenderer = Callable[[str], Picture]
"""From the text of an observation to what the policy sees. An environment takes one as an argument."""


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """The basic layout, so that a picture is the same on every machine (number_line.picture)."""
    return ImageFont.truetype(FONT_FILE, size, layout_engine=ImageFont.Layout.BASIC)


def wrap_text(text: str, size: int) -> list[str]:
    """Lines of at most the picture's width, as far as words can be parted."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and load_font(size).getlength(longer) <= IMAGE_SIDE - 2 * MARGIN:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


@lru_cache(maxsize=512)
def draw_text(text: str) -> Picture:
    """The words in black on white, as large as they fit; what does not fit at the smallest size is cut. Shared: not to be changed."""
    room = IMAGE_SIDE - 2 * MARGIN
    for size in FONT_SIZES:
        lines, height = wrap_text(text, size), round(1.2 * size)
        if len(lines) * height <= room and all(load_font(size).getlength(line) <= room for line in lines):
            break
    shown = Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "white")
    pen = ImageDraw.Draw(shown)
    for number, line in enumerate(lines):
        pen.text((MARGIN, MARGIN + number * height), line, fill="black", font=load_font(size))
    return shown


@cache
def draw_blank(text: str) -> Picture:
    """White, whatever there is to see: what a policy that looks is compared with."""
    return Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "white")
