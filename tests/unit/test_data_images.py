"""Stored pictures: what open() makes of them, what is refused by its header, what damage does. Oracles: pixels and headers by hand."""

import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_rl.data.images import StoredImage, flatten
from megatron_rl.types import HostFault
from tests.unit.tables import png


def test_a_picture_is_upright_rgb_on_white(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert flatten(clear).getpixel((0, 0)) == (255, 255, 255)
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    assert flatten(half).getpixel((0, 0)) == (255, 127, 127)
    deep = Image.fromarray(np.array([[0, 256 * 100, 65535]], dtype=np.uint16))
    assert [flatten(deep).getpixel((column, 0))[0] for column in range(3)] == [0, 100, 255]
    lying = Image.new("RGB", (30, 20), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    lying.save(tmp_path / "lying.jpg", exif=exif)
    image = StoredImage(tmp_path / "lying.jpg", "here")
    assert image.size() == image.open().size == (20, 30)


HEADER = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


def with_crc(width: int, height: int) -> bytes:
    """The head of a PNG of that size; there are no pixels behind it."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return HEADER + head + struct.pack(">I", zlib.crc32(b"IHDR" + head)) + b"\0\0\0\0IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (with_crc(20_000, 20_000), "20000x20000 pixels|decompression bomb"),
        (with_crc(9_999, 9_999), "9999x9999 pixels"),
        (with_crc(201, 1), "201x1 pixels: at most 89478485, and one side 200 times the other"),
        (b"", "cannot identify"),
        (b"GIF87a", "."),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot identify"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_that_must_not_be_decoded(content: bytes, said: str) -> None:
    image = StoredImage(content, "own.parquet row 0: images[0]")
    with pytest.raises(ValueError, match=rf"^own.parquet row 0: images\[0\]: .*({said})"):
        image.size()
    with pytest.raises(HostFault, match=rf"^own.parquet row 0: images\[0\]: cannot be opened \(.*({said})"):
        image.open()


def test_a_picture_of_one_pixel_is_one() -> None:
    assert StoredImage(png(size=(1, 1)), "here").open().size == StoredImage(png(size=(1, 1)), "here").size() == (1, 1)


def test_any_damage_to_a_picture_is_a_host_fault() -> None:
    draw, outcomes = random.Random(0), {True: 0, False: 0}
    for _ in range(400):
        content = bytearray(png(size=(40, 40), color="red"))
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
    except HostFault as fault:
        return str(fault)
