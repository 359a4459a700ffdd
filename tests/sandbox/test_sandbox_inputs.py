"""Tests the inputs that `open` accepts and refuses, and the fields of a box's reply that the pool
accepts."""

from io import BytesIO

import pytest
from PIL import Image

from megatron_rl_sandbox import replies
from megatron_rl_sandbox.frames import MalformedFrame
from megatron_rl_sandbox.image_codec import ImageBudget, encode_png
from megatron_rl_sandbox.inputs import BoxInput, collect_inputs
from megatron_rl_sandbox.layers import LAYER_NAMES, choose_layers
from megatron_rl_sandbox.records import BoxLimits, SandboxError

RED = Image.new("RGB", (40, 30), "red")
PNG = encode_png(RED)


def jpeg() -> bytes:
    buffer = BytesIO()
    RED.save(buffer, "JPEG")
    return buffer.getvalue()


def test_an_image_becomes_a_variable_and_a_file():
    made = collect_inputs(
        images={"image_0": RED, "photo.jpg": jpeg(), "image_1": jpeg(), "two words.png": PNG}, files={"a/b.txt": b"x"}, limits=BoxLimits()
    )
    assert [(item.name, item.variable, item.is_image) for item in made] == [
        ("image_0.png", "image_0", True),
        ("photo.jpg", "photo", True),
        ("image_1.jpg", "image_1", True),
        ("two words.png", None, True),
        ("a/b.txt", None, False),
    ]
    with Image.open(BytesIO(made[0].content)) as back:
        assert back.tobytes() == RED.tobytes()
    assert made[4] == BoxInput(name="a/b.txt", content=b"x")


@pytest.mark.parametrize(
    ("images", "files", "word"),
    [
        ({}, {"../a": b""}, "not a valid file name"),
        ({}, {"/a": b""}, "not a valid file name"),
        ({}, {"a//b": b""}, "not a valid file name"),
        ({}, {"": b""}, "not a valid file name"),
        ({}, {"a\0": b""}, "not a valid file name"),
        ({}, {"x" * 201: b""}, "not a valid file name"),
        ({}, {"a": b"", "a/b": b""}, "below another input"),
        ({"image_0": PNG}, {"image_0.png": b""}, "two inputs"),
        ({"image 0": PNG}, {}, "neither"),
        ({"class": PNG}, {}, "neither"),
        ({"__builtins__": PNG}, {}, "neither"),
        ({"image_0": b"<svg/>"}, {}, "bytes without the signature of"),
        ({"image_0": b""}, {}, "bytes without the signature of"),
        ({}, {"a": bytes(101)}, "input_bytes"),
        ({}, {str(number): b"" for number in range(1001)}, "limits are 1000 inputs"),
    ],
)
def test_an_input_that_is_no_good_is_named(images: dict[str, bytes], files: dict[str, bytes], word: str):
    """An invalid input raises a ValueError with the reason."""
    with pytest.raises(ValueError, match=word):
        collect_inputs(images=images, files=files, limits=BoxLimits(input_bytes=100 if "a" in files and len(files["a"]) > 100 else 1 << 20))


GOOD = {"id": 3, "error": None, "limit": None, "sources": [], "dropped": [], "files": {}, "cpu_s": 0.5, "memory": 7}
ERROR = {"type": "KeyError", "message": "'a'", "line": 2, "traceback": "..."}


@pytest.mark.parametrize(
    "change",
    [
        {"id": 2},
        {"id": True},
        {"id": "3"},
        {"sources": ["a"]},
        {"sources": None},
        {"dropped": [["image"]]},
        {"dropped": [["text", "x"]]},
        {"dropped": [["image", "x"]] * 101},
        {"files": []},
        {"files": {"a": -1}},
        {"files": {"a": 1.5}},
        {"files": {"a" * 5000: 1}},
        {"files": {str(number): 1 for number in range(101)}},
        {"cpu_s": float("nan")},
        {"cpu_s": -1.0},
        {"cpu_s": 3},
        {"memory": 1 << 64},
        {"error": "oops"},
        {"error": ERROR | {"type": 3}},
        {"error": ERROR | {"message": "x" * 2001}},
    ],
)
def test_a_reply_with_a_wrong_field_is_not_believed(change: dict[str, object]):
    """A reply of a box with one invalid field raises MalformedFrame."""
    with pytest.raises(MalformedFrame):
        replies.parse_reply((GOOD | change, []), number=3, limits=BoxLimits(), budget=ImageBudget(BoxLimits()))


def test_a_reply_is_cut_to_the_limits():
    """Images beyond the limits are dropped with a reason, and invalid fields of an error are
    replaced."""
    blobs = [PNG, b"GIF89a", encode_png(Image.new("L", (27, 100))), PNG, PNG]
    message = GOOD | {"sources": list("abcde"), "error": ERROR | {"line": -1, "message": "\ud800"}, "limit": "time"}
    few = BoxLimits(images=5, images_total=1)
    reply = replies.parse_reply((message, blobs), number=3, limits=few, budget=ImageBudget(few))
    assert [picture.source for picture in reply.pictures] == ["a"]
    assert [str(drop) for drop in reply.dropped] == [
        "image left out: b: not a PNG",
        "image left out: c: 27x100 pixels: the shorter side has less than 28; enlarge it",
        *(f"image left out: {source}: only 1 images are returned in total" for source in "de"),
    ]
    assert (reply.error.line, reply.error.message, reply.limit) == (None, "?", None)  # the pool sets limits from its own measurements only
    with pytest.raises(MalformedFrame, match="5 images, 4 allowed"):  # no worker of this project sends that many
        replies.parse_reply((message, blobs), number=3, limits=BoxLimits(images=4), budget=ImageBudget(few))


SIDES = 40 * 30
"""Number of pixels of each image below."""


@pytest.mark.parametrize(
    ("limits", "returned"),
    [
        (BoxLimits(), [3, 3]),
        (BoxLimits(images_total=4), [3, 1]),
        (BoxLimits(pixels=2 * SIDES), [2, 2]),
        (BoxLimits(pixels_total=4 * SIDES), [3, 1]),
        (BoxLimits(pixels_total=4 * SIDES - 1), [3, 0]),
        (BoxLimits(png_bytes=2 * len(encode_png(Image.new("L", (40, 30))))), [2, 2]),
        (BoxLimits(png_bytes_total=5 * len(encode_png(Image.new("L", (40, 30))))), [3, 2]),
    ],
)
def test_images_are_limited_per_call_and_in_total(limits: BoxLimits, returned: list[int]):
    """Images beyond the limits on count, pixels or bytes are left out and listed as dropped. Each
    of two calls returns three equal images."""
    message, blobs = GOOD | {"sources": list("abc")}, [encode_png(Image.new("L", (40, 30)))] * 3
    allowance = ImageBudget(limits)
    for expected in returned:
        reply = replies.parse_reply((message, blobs), number=3, limits=limits, budget=allowance)
        assert len(reply.pictures) == expected
        assert len(reply.dropped) == 3 - expected
        assert all("are returned" in str(drop) for drop in reply.dropped)


def test_the_room_needs_its_walls():
    """A missing required layer raises SandboxError. Other missing layers are left out or
    replaced."""
    everything: dict[str, str | None] = dict.fromkeys(LAYER_NAMES)
    assert set(LAYER_NAMES) - set(choose_layers(everything).enabled_names()) == {"user_ns", "watchdog"}
    without_root = everything | {"drop_uid": "no root", "cgroup": "not delegated"}
    assert set(LAYER_NAMES) - set(choose_layers(without_root).enabled_names()) == {"drop_uid", "cgroup"}
    assert "seccomp" not in choose_layers(everything | {"seccomp": "old kernel"}).enabled_names()
    for name in ("mount_ns", "net_ns", "pid_ns", "private_tmp", "capabilities"):
        with pytest.raises(SandboxError, match=f"{name}: refused.*isolation=.none"):
            choose_layers(everything | {name: "refused"})
    with pytest.raises(SandboxError, match="user_ns: sysctl"):
        choose_layers(without_root | {"user_ns": "sysctl"})
