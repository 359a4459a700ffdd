"""Tests stored images: the result of open(), images that are refused because of their header, and
damaged files. Oracles: values by hand and Pillow's results.
"""

import random
import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from megatron_rl.data.images import StoredImage, convert_to_rgb
from megatron_rl.errors import InfraError
from tests.support.data_files import make_png


def test_a_picture_is_upright_rgb_on_white(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert convert_to_rgb(clear).getpixel((0, 0)) == (255, 255, 255)
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    assert convert_to_rgb(half).getpixel((0, 0)) == (255, 127, 127)
    deep = Image.fromarray(np.array([[0, 256 * 100, 65535]], dtype=np.uint16))
    assert [convert_to_rgb(deep).getpixel((column, 0))[0] for column in range(3)] == [0, 100, 255]
    lying = Image.new("RGB", (30, 20), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    lying.save(tmp_path / "lying.jpg", exif=exif)
    image = StoredImage(tmp_path / "lying.jpg", "here")
    assert image.size() == image.open().size == (20, 30)


def exif(*entries: tuple[int, int, int, bytes]) -> bytes:
    """Return the EXIF data of a JPEG with these entries of tag, type, count and value (EXIF 2.3,
    section 4.6.2).
    """
    table, behind = b"", b""
    for tag, kind, count, value in entries:
        place = value.ljust(4, b"\0") if len(value) <= 4 else struct.pack("<I", 14 + 12 * len(entries) + len(behind))
        table += struct.pack("<HHI", tag, kind, count) + place
        behind += value if len(value) > 4 else b""
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(4) + behind


def saved(form: str, **options: object) -> bytes:
    """Return an encoded image of 9x6 pixels of noise."""
    buffer = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (6, 9, 3), dtype=np.uint8)).save(buffer, format=form, **options)
    return buffer.getvalue()


def turned(orientation: int) -> tuple[int, int, int, bytes]:
    return 0x0112, 3, 1, struct.pack("<H", orientation)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "TIFF with LZW", "JPEG with XMP", "TIFF with XMP"])
def test_a_turned_picture_is_what_pillow_makes_of_it(form: str, orientation: int) -> None:
    name, _, rest = form.partition(" with ")
    in_exif = Image.Exif()
    in_exif[0x0112] = orientation
    xmp = f'<x tiff:Orientation="{orientation}"/>'.encode()
    in_xmp = {"tiffinfo": {700: xmp}} if name == "TIFF" else {"xmp": xmp}
    options = in_xmp if rest == "XMP" else {"exif": in_exif}
    content = saved(name, **options, **({"compression": "tiff_lzw"} if rest == "LZW" else {}))
    image = StoredImage(content, "here")
    with Image.open(BytesIO(content)) as picture:
        oracle = ImageOps.exif_transpose(picture).convert("RGB")
    opened = image.open()
    assert image.size() == opened.size == oracle.size == ((6, 9) if orientation in (5, 6, 7, 8) else (9, 6))
    assert opened.tobytes() == oracle.tobytes()


@pytest.mark.parametrize("odd", [(0x011A, 2, 3, b"72\0"), (0x010E, 11, 1, struct.pack("<f", 1.5))], ids=["resolution", "description"])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_exif_of_odd_types_is_no_reason_to_refuse(form: str, odd: tuple[int, int, int, bytes]) -> None:
    """XResolution as text and ImageDescription as a number do not prevent reading. Pillow 13 reads
    both, but cannot write them again.
    """
    content = saved(form, exif=exif(*sorted([odd, turned(6)])))
    with Image.open(BytesIO(content)) as picture, pytest.raises((TypeError, AttributeError)):
        ImageOps.exif_transpose(picture)
    with Image.open(BytesIO(content)) as picture:
        oracle = picture.convert("RGB").rotate(-90, expand=True)
    image = StoredImage(content, "here")
    assert image.size() == (6, 9) and image.open().tobytes() == oracle.tobytes()


@pytest.mark.parametrize("kind", range(14))
def test_an_orientation_of_any_type(kind: int) -> None:
    for count in range(4):
        image = StoredImage(
            saved("JPEG", exif=exif((0x0112, kind, count, bytes([6, 0, 0, 0, 1, 0, 0, 0] * 4)[: max(count * 8, 4)]))), "here"
        )
        assert image.size() == image.open().size


def test_damaged_headers_are_read_or_refused_alike() -> None:
    """With random changes in the bytes of EXIF and of TIFF's table, size() and open() raise only
    their own errors, and return the same size if both succeed.
    """
    draw, outcomes = random.Random(0), {True: 0, False: 0}
    entries = (0x010E, 2, 8, b"a house\0"), turned(6), (0x011A, 5, 1, struct.pack("<II", 72, 1))
    wholes = [saved(form, exif=exif(*entries)) for form in ("JPEG", "WEBP", "TIFF")]
    for _ in range(3000):
        content = bytearray(draw.choice(wholes))
        start = max(content.find(b"II*\0"), 0)
        if content.startswith(b"II"):  # the header of a TIFF has the offset of its table
            start = struct.unpack("<I", content[4:8])[0]
        for _ in range(draw.randint(1, 4)):
            content[min(start + draw.randrange(100), len(content) - 1)] = draw.choice((draw.randrange(256), draw.randrange(13), 0, 255))
        image = StoredImage(bytes(content), "here")
        said, size = opened_or_fault(image), size_or_error(image)
        assert said == "RGB" or said.startswith("here: cannot be opened (")
        assert said != "RGB" or size == str(image.open().size)
        outcomes[said == "RGB"] += 1
    assert min(outcomes.values()) > 100


def size_or_error(image: StoredImage) -> str:
    try:
        return str(image.size())
    except ValueError as error:
        return str(error)


HEADER = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


def with_crc(width: int, height: int) -> bytes:
    """Return the header of a PNG of this size, without pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return HEADER + head + struct.pack(">I", zlib.crc32(b"IHDR" + head)) + b"\0\0\0\0IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (with_crc(20_000, 20_000), "20000x20000 pixels|decompression bomb"),
        (with_crc(9_999, 9_999), "9999x9999 pixels"),
        (with_crc(101, 1), "101x1 pixels: at most 89478485 pixels and an aspect ratio of 100"),
        (b"", "is empty"),
        (b"GIF87a", "."),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "is PostScript; PNG, JPEG, WEBP, GIF, BMP and TIFF are supported: convert it",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_that_must_not_be_decoded(content: bytes, said: str) -> None:
    image = StoredImage(content, "own.parquet row 0: images[0]")
    with pytest.raises(ValueError, match=rf"^own.parquet row 0: images\[0\]: .*({said})"):
        image.size()
    with pytest.raises(InfraError, match=rf"^own.parquet row 0: images\[0\]: cannot be opened \(.*({said})"):
        image.open()


def test_a_picture_of_one_pixel_is_one() -> None:
    assert StoredImage(make_png(size=(1, 1)), "here").open().size == StoredImage(make_png(size=(1, 1)), "here").size() == (1, 1)


def test_any_damage_to_a_picture_is_a_host_fault() -> None:
    draw, outcomes = random.Random(0), {True: 0, False: 0}
    for _ in range(400):
        content = bytearray(make_png(size=(40, 40), color="red"))
        for _ in range(draw.randint(1, 6)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        image = StoredImage(bytes(content[: draw.randint(1, len(content))]), "here")
        said = opened_or_fault(image)
        outcomes[said.startswith("here: cannot be opened (")] += 1
        assert said == "RGB" or said.startswith("here: cannot be opened (")
    assert min(outcomes.values()) > 0


def opened_or_fault(image: StoredImage) -> str:
    try:
        return image.open().mode
    except InfraError as fault:
        return str(fault)
