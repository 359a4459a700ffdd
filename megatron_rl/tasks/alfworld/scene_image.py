"""Scene images, drawn from the text observations.

No simulator is used. A renderer that returns frames from the THOR simulator could be implemented as
another `SceneRenderer`.
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
"""Function that draws the image of an observation from the observation text. `AlfworldEnv` takes
such a function as the argument `render`.
"""


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font at the given size.

    The font uses Pillow's basic text layout, which produces identical images on every machine (see
    number_line.draw_state).
    """
    return ImageFont.truetype(FONT_FILE, size, layout_engine=ImageFont.Layout.BASIC)


def wrap_text(text: str, size: int) -> list[str]:
    """Split text at spaces into lines that fit the image width.

    A word that is wider than the image is not split.
    """
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

    Text that does not fit even in the smallest font is cut off at the border. The image is cached
    and shared: do not modify it.
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
    """Return a blank white image.

    Evaluations with blank images measure how much a policy depends on its image input.
    """
    return Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "white")
