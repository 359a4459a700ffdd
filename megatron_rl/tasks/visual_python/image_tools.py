"""Image tools of DeepEyes (arXiv 2505.14362), zoom and rotate, which accept untrusted arguments.

Both tools work on the question's first image at its original resolution. The zoom tool applies
DeepEyes' rules for boxes:

- A box is clamped to the image.
- Each side of a box must be longer than 30 pixels.
- The longer side of the crop must be at most 100 times as long as the shorter side.
- A side of less than 28 pixels (one image token) is extended to 28 pixels around the box's center.

DeepEyes checks the minimum of 30 pixels after clamping, so the last rule never applies in DeepEyes.
Here the minimum is checked before clamping, so a clamped box may be small enough to be extended.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from PIL import Image
from PIL.Image import Image as Picture

MIN_BOX_SIDE = 30
MIN_CROP_SIDE = 28
MAX_ASPECT_RATIO = 100
MAX_NUMBER = 1e9


class ToolError(ValueError):
    """Invalid arguments of an image tool; the message is sent to the policy."""


@dataclass(slots=True, frozen=True)
class ImageTool:
    """Image tool, with its description and JSON schema for the prompt."""

    description: str
    parameters: Mapping[str, object]
    """JSON schema of the arguments."""
    apply: Callable[[Picture, Mapping[str, object]], Picture]
    """Function that applies the tool to an image. The function raises ToolError for invalid
    arguments.
    """


def zoom_image(picture: Picture, arguments: Mapping[str, object]) -> Picture:
    """Crop the image to `bbox_2d`.

    The box is [x1, y1, x2, y2] in pixels, measured from the upper left corner of the image.

    Raises:
        ToolError: The box is malformed, too small, too elongated or outside of the image.
    """
    width, height = picture.size
    inside = f"in pixels of the original image, which is {width} wide and {height} high"
    box = arguments.get("bbox_2d")
    if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
        raise ToolError(f"bbox_2d must be four numbers [x1, y1, x2, y2] {inside}")
    x1, y1, x2, y2 = box
    if not (x1 < x2 and y1 < y2):
        raise ToolError("bbox_2d must have x1 < x2 and y1 < y2")
    if min(x2 - x1, y2 - y1) <= MIN_BOX_SIDE:
        raise ToolError(f"both sides of bbox_2d must be longer than {MIN_BOX_SIDE} pixels; it is {inside}")
    if x1 >= width or y1 >= height or x2 <= 0 or y2 <= 0:
        raise ToolError(f"bbox_2d lies outside of the image; it is {inside}")
    left, right = _grow_to_min_side(max(0, math.floor(x1)), min(width, math.ceil(x2)), limit=width)
    top, bottom = _grow_to_min_side(max(0, math.floor(y1)), min(height, math.ceil(y2)), limit=height)
    shorter, longer = sorted((right - left, bottom - top))
    if longer > MAX_ASPECT_RATIO * shorter:
        raise ToolError(f"bbox_2d is {right - left} wide and {bottom - top} high: one side is more than {MAX_ASPECT_RATIO} times the other")
    return picture.crop((left, top, right, bottom))


def rotate_image(picture: Picture, arguments: Mapping[str, object]) -> Picture:
    """Rotate the image counterclockwise by `angle` degrees.

    The canvas is enlarged to contain the whole rotated image. Areas of the canvas outside of the
    rotated image are black.

    Raises:
        ToolError: The angle is not a number, or the result is too elongated.
    """
    angle = arguments.get("angle")
    if not _is_number(angle):
        raise ToolError("angle must be a number of degrees, counterclockwise")
    turned = picture.rotate(float(angle) % 360, resample=Image.Resampling.BICUBIC, expand=True)
    shorter, longer = sorted(turned.size)
    if longer > MAX_ASPECT_RATIO * shorter:
        raise ToolError(
            f"the turned image has {turned.width} x {turned.height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other"
        )
    return turned


IMAGE_TOOLS: Mapping[str, ImageTool] = {
    "zoom": ImageTool(
        "Shows one part of the original image, enlarged.",
        {
            "type": "object",
            "properties": {
                "bbox_2d": {
                    "type": "array",
                    "items": {"type": "number"},
                    "minItems": 4,
                    "maxItems": 4,
                    "description": "[x1, y1, x2, y2]: upper left and lower right corner in pixels of the original image.",
                },
                "label": {"type": "string", "description": "What the part shows; optional."},
            },
            "required": ["bbox_2d"],
        },
        zoom_image,
    ),
    "rotate": ImageTool(
        "Shows the original image turned.",
        {
            "type": "object",
            "properties": {"angle": {"type": "number", "description": "Degrees, counterclockwise."}},
            "required": ["angle"],
        },
        rotate_image,
    ),
}


def _is_number(value: object) -> TypeGuard[float]:
    """Return True for a non-boolean number with an absolute value of at most 1e9."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _grow_to_min_side(start: int, end: int, *, limit: int) -> tuple[int, int]:
    """Extend an interval to length MIN_CROP_SIDE around its center, within the range 0..`limit`.

    An interval that is already at least MIN_CROP_SIDE long is returned unchanged. `limit` is the
    length of the image's side.
    """
    missing = MIN_CROP_SIDE - (end - start)
    if missing <= 0:
        return start, end
    start = max(0, min(start - missing // 2, limit - MIN_CROP_SIDE))
    return start, min(limit, start + MIN_CROP_SIDE)
