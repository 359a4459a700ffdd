"""Writes descriptions that name the dominant colors of an object on a plain background.

The descriptions are SFT data for models with a million parameters. Color descriptions are not
sufficient for data sets of photographs, which require a speaker model that recognizes real objects.
"""

from collections.abc import Sequence

import numpy as np
from PIL.Image import Image as Picture

COLORS = {
    "red": (200, 40, 45), "orange": (245, 130, 40), "yellow": (250, 205, 60), "green": (90, 165, 60), "blue": (50, 120, 215),
    "purple": (135, 80, 190), "pink": (245, 130, 175), "brown": (125, 75, 50), "black": (45, 45, 50), "gray": (140, 140, 145),
    "white": (240, 240, 240),
}  # fmt: skip
MAX_COLORS = 3
"""Maximum number of colors in a description."""
MIN_COLOR_SHARE = 0.08
"""Minimum fraction of the object's pixels that a color must cover to be named."""
BACKGROUND_TOLERANCE = 12
"""Maximum per-channel difference from the background color, on a scale of 0 to 255, at which a
pixel still counts as background.
"""


def find_dominant_colors(picture: Picture) -> list[str]:
    """Return the object's most frequent colors in order of decreasing frequency.

    The most frequent color is always included, even if it covers less than MIN_COLOR_SHARE of the
    object. If the image contains no object, the color of the background is returned.
    """
    pixels = np.asarray(picture.convert("RGB"), dtype=np.int32)
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    found, counts = np.unique(edge, axis=0, return_counts=True)
    background = found[counts.argmax()]
    things = pixels[np.abs(pixels - background).max(-1) > BACKGROUND_TOLERANCE]
    named = np.array(list(COLORS.values()))
    seen = things if len(things) else background[None]
    nearest = ((seen[:, None] - named) ** 2).sum(-1).argmin(1)
    shares = np.bincount(nearest, minlength=len(named)) / len(nearest)
    order = sorted(range(len(named)), key=lambda place: (-shares[place], place))
    return [list(COLORS)[place] for place in order[:MAX_COLORS] if shares[place] >= MIN_COLOR_SHARE or place == order[0]]


def join_words(words: Sequence[str]) -> str:
    """Join words with commas and a final "and", e.g. red, blue and white."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def describe_by_color(picture: Picture, *, category: str) -> str:
    """Return a speaker's reply that names the dominant colors of the object in an image."""
    return write_color_description(find_dominant_colors(picture), category=category)


def write_color_description(colors: Sequence[str], *, category: str) -> str:
    """Return a speaker's reply that names the given colors."""
    return _write_reply(category, phrase=colors[0], sentence=f"is {join_words(colors)}")


def write_vague_description(*, category: str) -> str:
    """Return a speaker's reply that names no color and therefore fits every object of the category.

    The format is the same as in `write_color_description`.
    """
    return _write_reply(category, phrase="single", sentence="is one of many")


def _write_reply(category: str, *, phrase: str, sentence: str) -> str:
    thinking = f"What tells this {category} from others?"
    return (
        f"<thinking>{thinking}</thinking>\n<coarse>a photo of a {phrase} {category}</coarse>\n"
        f"<detailed>The {category} {sentence}.</detailed>"
    )
