"""The picture of a scene: its text observation, drawn. There is no simulator here; frames of THOR would be another `Look`."""

from collections.abc import Callable
from functools import cache, lru_cache

from PIL import Image, ImageDraw, ImageFont
from PIL.Image import Image as Picture

from megatron_rl.tasks.gym_cards.number_line import FONT_FILE

SIDE = 300
"""Pixels, as RL4VLM's frames."""
MARGIN = 8
SIZES = (44, 40, 36, 32, 28, 25, 22, 20, 18, 16, 14, 12, 10, 8)
Look = Callable[[str], Picture]
"""From the text of an observation to what the policy sees. An environment takes one as an argument."""


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """The basic layout, so that a picture is the same on every machine (number_line.picture)."""
    return ImageFont.truetype(FONT_FILE, size, layout_engine=ImageFont.Layout.BASIC)


def wrapped(text: str, size: int) -> list[str]:
    """Lines of at most the picture's width, as far as words can be parted."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font(size).getlength(longer) <= SIDE - 2 * MARGIN:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


@lru_cache(maxsize=512)
def drawn(text: str) -> Picture:
    """The words in black on white, as large as they fit; what does not fit at the smallest size is cut. Shared: not to be changed."""
    room = SIDE - 2 * MARGIN
    for size in SIZES:
        lines, height = wrapped(text, size), round(1.2 * size)
        if len(lines) * height <= room and all(font(size).getlength(line) <= room for line in lines):
            break
    shown = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(shown)
    for number, line in enumerate(lines):
        pen.text((MARGIN, MARGIN + number * height), line, fill="black", font=font(size))
    return shown


@cache
def blank(text: str) -> Picture:
    """White, whatever there is to see: what a policy that looks is compared with."""
    return Image.new("RGB", (SIDE, SIDE), "white")
