"""Image of a scene: its text observation, drawn.

There is no simulator here; a renderer of THOR frames would be another `SceneRenderer`.
"""

from collections.abc import Callable
from functools import cache, lru_cache

from PIL import Image, ImageDraw, ImageFont
from PIL.Image import Image as Picture

from megatron_rl.tasks.gym_cards.number_line import FONT_FILE

IMAGE_SIDE = 300
"""Side length of the image in pixels, as in RL4VLM."""
MARGIN = 8
FONT_SIZES = (44, 40, 36, 32, 28, 25, 22, 20, 18, 16, 14, 12, 10, 8)
SceneRenderer = Callable[[str], Picture]
"""Maps the text of an observation to the image that the policy sees; an argument of the
environment.
"""


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font in a size.

    It uses the basic layout, so that images are identical on every machine
    (number_line.draw_state).
    """
    return ImageFont.truetype(FONT_FILE, size, layout_engine=ImageFont.Layout.BASIC)


def wrap_text(text: str, size: int) -> list[str]:
    """Wrap text into lines of at most the image's width; words are not split."""
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
    """Draw the text in black on white, in the largest font that fits.

    Text that does not fit at the smallest size is cut off. The image is cached and shared: do not
    modify it.
    """
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
    """Return a white image, the baseline for a policy that uses the image."""
    return Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "white")
