"""Tests the check of hostile PNGs against Pillow, and the image limits against hand-computed
numbers."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from megatron_rl_sandbox import image_codec
from megatron_rl_sandbox.records import BoxLimits


def picture(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(noise, "RGBA").convert(mode)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + kind + body + struct.pack("!I", zlib.crc32(kind + body))


def png(
    *, size: tuple[int, int] = (40, 30), color: int = 0, depth: int = 8, data: bytes | None = None, between: bytes = b"", interlace: int = 0
):
    header = struct.pack("!IIBBBBB", *size, depth, color, 0, 0, interlace)
    rows = zlib.compress((b"\0" + b"a" * size[0]) * size[1]) if data is None else data
    return image_codec.PNG_SIGNATURE + chunk(b"IHDR", header) + between + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "CMYK", "1", "LA", "I", "F", "I;16", "HSV", "YCbCr"])
def test_every_mode_comes_back_as_pillow_shows_it(mode: str):
    """An encoded image passes the check, and its pixels equal Pillow's conversion of the
    original."""
    original = (
        picture().convert("I").convert("I;16") if mode == "I;16" else picture("RGB" if mode in ("HSV", "YCbCr", "CMYK", "P") else "RGBA")
    )
    original = original if mode == "I;16" else original.convert("L").convert(mode) if mode in ("I", "F") else original.convert(mode)
    written = image_codec.encode_png(original)
    assert image_codec.check_png(written) == original.size
    with Image.open(BytesIO(written)) as back:
        expected = original if mode in ("L", "RGB", "RGBA") else original.convert("RGBA" if mode == "LA" else "RGB")
        assert back.mode == expected.mode
        assert back.tobytes() == expected.tobytes()


def test_what_a_picture_carries_beside_pixels_stays_behind():
    """Encoding drops the metadata of an image."""
    loaded = picture()
    loaded.info |= {"icc_profile": b"x" * 100, "transparency": (1, 2, 3), "dpi": (72, 72), "comment": "secret"}
    with Image.open(BytesIO(image_codec.encode_png(loaded))) as back:
        assert back.info == {}


@pytest.mark.parametrize(("chunks", "refused"), [(image_codec.MAX_PNG_CHUNKS, False), (image_codec.MAX_PNG_CHUNKS + 1, True)])
def test_chunks_are_counted(chunks: int, refused: bool):
    """A PNG of 1000 chunks is accepted, one of 1001 is refused. Header, pixels and end are three
    chunks; the others are empty IDAT chunks, which Pillow would walk."""
    written = png(between=chunk(b"IDAT", b"") * (chunks - 3))
    assert image_codec.MAX_PNG_CHUNKS == 1000
    if refused:
        with pytest.raises(ValueError, match="chunks"):
            image_codec.check_png(written)
    else:
        assert image_codec.check_png(written) == (40, 30)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"", "not a PNG"),
        (b"GIF89a" + bytes(100), "not a PNG"),
        (png(depth=16), "plain"),
        (png(color=3), "plain"),
        (png(interlace=1), "plain"),
        (png(size=(0, 30)), "plain"),
        (png(between=chunk(b"tEXt", b"a\0b")), "chunks"),
        (png(between=chunk(b"iCCP", b"a\0\0b")), "chunks"),
        (png() + b"tail", "cut short"),
        (png()[:-4], "cut short"),
        (png()[:-12], "chunks"),
        (png()[:-20] + bytes(8) + png()[-12:], "cut short|checksum"),
        (png(data=b"no zlib data at all"), "pixel data"),
        (png(data=zlib.compress(b"\0" * 41 * 29)), "announces"),
        (png(data=zlib.compress(b"\0" * 41 * 31)), "announces"),
        (png(data=zlib.compress(b"\0" * (1 << 28))), "announces"),
        (png(data=zlib.compress(b"\0" * 41 * 30)[:-3]), "announces"),
        (png(data=zlib.compress((b"\5" + b"a" * 40) * 30)), "announces"),
    ],
)
def test_a_png_that_could_trouble_a_reader_is_refused(bad: bytes, why: str):
    with pytest.raises(ValueError, match=why):
        image_codec.check_png(bad)


@settings(max_examples=300)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_no_changed_byte_gets_past_the_check_and_then_troubles_pillow(place: int, value: int):
    """A PNG with one changed byte is refused, or Pillow decodes it to the size that the check
    returned."""
    damaged = bytearray(PLAIN)
    damaged[place % len(PLAIN)] = value
    try:
        size = image_codec.check_png(bytes(damaged))
    except ValueError:
        return
    with Image.open(BytesIO(bytes(damaged))) as back:
        back.load()
        assert back.size == size


PLAIN = image_codec.encode_png(picture())


@pytest.mark.parametrize(
    ("width", "height", "word"),
    [
        (28, 28, None),
        (27, 100, "shorter side"),
        (100, 27, "shorter side"),
        (28, 2800, None),
        (28, 2801, "times the other"),
        (2000, 2000, None),
        (2001, 2000, "more than 4000000 pixels"),
    ],
)
def test_limits_of_an_image(width: int, height: int, word: str):
    reason = image_codec.check_image_size(width=width, height=height, limits=BoxLimits())
    assert reason is None if word is None else word in reason
