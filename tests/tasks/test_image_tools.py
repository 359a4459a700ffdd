"""Tests zoom and rotate against hand-computed boxes, on an image whose pixels encode their
position."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from megatron_rl.tasks.visual_python.image_tools import IMAGE_TOOLS, ToolError, rotate_image, zoom_image

WIDTH, HEIGHT = 200, 120


@pytest.fixture(scope="module")
def atlas() -> Image.Image:
    """Return an image whose red value is the column and whose green value is the row."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(WIDTH), np.arange(HEIGHT)[:, None]
    return Image.fromarray(pixels)


def corners(picture: Image.Image) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a crop of the atlas, as crop() counts them."""
    (left, top, _), (right, bottom, _) = picture.getpixel((0, 0)), picture.getpixel((picture.width - 1, picture.height - 1))
    return left, top, right + 1, bottom + 1


@pytest.mark.parametrize(
    ("box", "cropped"),
    [
        ([10, 20, 60, 90], (10, 20, 60, 90)),
        ([10.9, 20.1, 59.2, 89.5], (10, 20, 60, 90)),
        ([-500, -3, 1e6, 1e9], (0, 0, 200, 120)),
        ([150, 50, 260, 100], (150, 50, 200, 100)),
        ([100, 0, 131, 31], (100, 0, 131, 31)),
        ([190, 20, 240, 80], (172, 20, 200, 80)),
        ([-40, -40, 5, 5], (0, 0, 28, 28)),
        ([20, 112, 80, 160], (20, 92, 80, 120)),
        ([-20, 40, 12, 75], (0, 40, 28, 75)),
    ],
)
def test_a_box_by_hand(atlas: Image.Image, box: list, cropped: tuple[int, int, int, int]) -> None:
    shown = zoom_image(atlas, {"bbox_2d": box, "label": "anything"})
    assert corners(shown) == cropped
    assert shown.size == (cropped[2] - cropped[0], cropped[3] - cropped[1])


@pytest.mark.known_failure("boxes-by-eval")
@pytest.mark.parametrize(
    ("box", "error"),
    [
        (None, "four numbers"),
        ("10, 20, 60, 90", "four numbers"),
        ("[10, 20, 60, 10 + 80]", "four numbers"),
        ("__import__('os').abort()", "four numbers"),
        ([10, 20, 60], "four numbers"),
        ([10, 20, 60, 90, 1], "four numbers"),
        ([10, 20, 60, "90"], "four numbers"),
        ([10, 20, 60, True], "four numbers"),
        ([10, 20, 60, None], "four numbers"),
        ([0, 0, float("inf"), 90], "four numbers"),
        ([0, 0, float("nan"), 90], "four numbers"),
        ([0, 0, 10**400, 90], "four numbers"),
        ([60, 20, 10, 90], "x1 < x2"),
        ([10, 90, 60, 90], "x1 < x2"),
        ([10, 20, 40, 90], "longer than 30"),
        ([0.1, 0.2, 0.5, 0.9], "longer than 30 pixels; it is in pixels of the original image, which is 200 wide and 120 high"),
        ([200, 0, 300, 100], "outside"),
        ([0, 120, 100, 300], "outside"),
        ([-100, 0, 0, 100], "outside"),
        ([0, -100, 100, 0], "outside"),
    ],
)
def test_a_bad_box_is_explained(atlas: Image.Image, box: object, error: str) -> None:
    with pytest.raises(ToolError, match=error):
        zoom_image(atlas, {"bbox_2d": box})


def test_no_box_is_explained(atlas: Image.Image) -> None:
    with pytest.raises(ToolError, match="four numbers"):
        zoom_image(atlas, {"label": "cup"})


def test_pictures_of_extreme_sizes() -> None:
    """An image of one pixel is returned unchanged. Of a strip 3000 times as long as wide, only
    parts up to 100 times as long as wide are returned."""
    assert zoom_image(Image.new("RGB", (1, 1), "red"), {"bbox_2d": [-20, -20, 20, 20]}).size == (1, 1)
    strip = Image.new("RGB", (30_000, 10))
    assert zoom_image(strip, {"bbox_2d": [500, -100, 1500, 100]}).size == (1000, 10)
    with pytest.raises(ToolError, match="1001 wide and 10 high: one side is more than 100 times"):
        zoom_image(strip, {"bbox_2d": [500, -100, 1501, 100]})
    with pytest.raises(ToolError, match="30000 x 10 pixels: one side is more than 100 times"):
        rotate_image(strip, {"angle": 0})


@pytest.mark.parametrize(("angle", "turns"), [(90, 1), (180, 2), (-90, 3), (450, 1), (0, 0), (-360.0, 0)])
def test_right_angles_turn_like_numpy(atlas: Image.Image, angle: float, turns: int) -> None:
    assert np.array_equal(np.asarray(rotate_image(atlas, {"angle": angle})), np.rot90(np.asarray(atlas), turns))


def test_any_angle_keeps_the_whole_picture() -> None:
    """A white image of 100 x 60 that is rotated by 30 degrees becomes 100 cos + 60 sin by 100 sin +
    60 cos pixels large, and keeps its white area."""
    turned = rotate_image(Image.new("L", (100, 60), 255), {"angle": 30})
    assert abs(turned.width - 116.6) <= 2 and abs(turned.height - 102.0) <= 2
    assert abs(np.asarray(turned).sum() / 255 - 6000) < 100


@pytest.mark.parametrize("angle", [None, "90", True, float("nan"), float("inf"), 10**400, [90]])
def test_a_bad_angle_is_explained(atlas: Image.Image, angle: object) -> None:
    with pytest.raises(ToolError, match="number of degrees"):
        rotate_image(atlas, {"angle": angle})


numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3), st.floats(-300, 300), st.integers(-300, 300))


@settings(max_examples=1000, deadline=None)
@given(box=st.lists(numbers, min_size=3, max_size=5), size=st.tuples(st.integers(1, 300), st.integers(1, 300)))
def test_any_box_gives_a_picture_that_can_be_shown_or_a_sentence(box: list, size: tuple[int, int]) -> None:
    """Every box yields an image or a ToolError. The image lies inside the original, has at least 28
    pixels per side if the original has them, and is no strip."""
    try:
        shown = zoom_image(Image.new("L", size), {"bbox_2d": box})
    except ToolError:
        return
    assert all(min(28, whole) <= side <= whole for side, whole in zip(shown.size, size, strict=True))
    assert max(shown.size) <= 100 * min(shown.size)
    x1, y1, x2, y2 = box
    assert min(x2 - x1, y2 - y1) > 30


def test_schemas_are_json() -> None:
    for tool in IMAGE_TOOLS.values():
        assert json.loads(json.dumps(tool.parameters))["required"][0] in tool.parameters["properties"]
