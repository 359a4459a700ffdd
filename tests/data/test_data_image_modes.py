"""Tests how images of every mode are read, from the checks at the start of a run to the pixel
values that the model receives.

Oracles: samples that the test has written, and OpenCV's own libtiff and BMP readers
(IMREAD_UNCHANGED returns the stored samples).
"""

import struct
import zlib
from collections.abc import Sequence
from io import BytesIO

import cv2
import numpy as np
import pytest
from PIL import Image

from megatron_rl.data.images import StoredImage
from megatron_rl.errors import InfraError
from tests.support import tiff_files as tiff
from tests.support.png_files import COLOR, COLOR_ALPHA, GRAY, GRAY_ALPHA, INDEXED, make_chunk, write_png
from tests.support.tiff_files import write_tiff

ORDERS = pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big"])


def opened(content: bytes) -> np.ndarray:
    """Return the pixel values [H, W, 3] of an image that passes the checks at the start of a
    run.
    """
    image = StoredImage(content, "rows.jsonl row 3: images[0]")
    size, picture = start(image), image.open()
    assert (picture.mode, picture.size) == ("RGB", size)
    return np.asarray(picture)


def start(image: StoredImage) -> tuple[int, int]:
    """Check the image as the start of a run does (data/survey.py)."""
    size = image.size()
    image.check_complete()
    return size


def refusal(content: bytes) -> str:
    """Return the one-line error of the checks at the start of a run.

    `open()` must refuse the image, too.
    """
    image = StoredImage(content, "rows.jsonl row 3: images[0]")
    with pytest.raises(ValueError, match=r"^rows.jsonl row 3: images\[0\]: ") as error:
        start(image)
    with pytest.raises(InfraError):
        image.open()
    assert "\n" not in str(error.value) and "object at" not in str(error.value)
    return str(error.value)


def unchanged(content: bytes) -> np.ndarray:
    """Return the samples as read by OpenCV, in the order RGB or RGBA."""
    samples = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    return samples if samples.ndim == 2 else samples[:, :, [2, 1, 0, 3][: samples.shape[2]]]


def noise(*shape: int, kind: str = "u1", below: int = 256) -> np.ndarray:
    return np.random.default_rng(0).integers(0, below, shape).astype(kind)


def gray(levels_HW: np.ndarray) -> np.ndarray:
    return np.repeat(levels_HW.astype(np.uint8)[:, :, None], 3, axis=2)


def over_white(samples_HWS: np.ndarray, *, premultiplied: bool = False) -> np.ndarray:
    """Composite the colors on white, with the last sample as alpha."""
    colors, alpha = samples_HWS[:, :, :-1].astype(float), samples_HWS[:, :, -1:].astype(float) / 255
    flat = (colors if premultiplied else colors * alpha) + 255 * (1 - alpha)
    return np.broadcast_to(flat, (*flat.shape[:2], 3))


RAMP = np.tile(np.linspace(0, 65535, 256), (8, 1))


@pytest.mark.known_failure("deep-images")
@ORDERS
def test_the_files_of_case_i1(order: str) -> None:
    """Images of 16 bits keep all 256 levels. Floats in 0..1, 32 bits, and 32 bits with values in
    0..255 are refused at the start (public case I1).
    """
    assert np.unique(opened(write_tiff(RAMP.astype("u2"), photometric=1, order=order))).size == 256
    assert "has samples that are floating-point numbers; save it as 8-bit RGB or gray" in refusal(
        write_tiff((RAMP / 65535).astype("f4"), photometric=1, order=order)
    )
    for values in (RAMP * 65537, RAMP // 257):
        assert refusal(write_tiff(values.astype("u4"), photometric=1, order=order))
    assert "32-bit samples of unknown range" in refusal(write_tiff(RAMP.astype("u4"), photometric=1, order="<"))


@ORDERS
@pytest.mark.parametrize("photometric", [tiff.WHITE_IS_ZERO, tiff.BLACK_IS_ZERO])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_gray_tiffs_of_all_depths(bits: int, photometric: int, order: str) -> None:
    values = noise(9, 13, kind="u2" if bits == 16 else "u1", below=1 << bits)
    content = write_tiff(values, photometric=photometric, order=order, bits=bits if bits < 8 else 0)
    shown = values if photometric == tiff.BLACK_IS_ZERO else (1 << bits) - 1 - values.astype(int)
    if (bits, photometric, order) == (16, tiff.WHITE_IS_ZERO, ">"):  # Pillow 13 has no mode for this layout
        assert "begins like a TIFF, but its header is damaged or not supported" in refusal(content)
        return
    levels = shown >> 8 if bits == 16 else shown * (255 // ((1 << bits) - 1))
    np.testing.assert_array_equal(opened(content), gray(levels))


def test_a_tiff_of_12_bits() -> None:
    values = noise(9, 13, kind="u2", below=4096)
    np.testing.assert_array_equal(opened(write_tiff(values, photometric=1, bits=12)), gray(values >> 4))
    assert refusal(write_tiff(values, photometric=1, bits=12, order=">"))


@ORDERS
@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "f2", "f4", "f8", "u4", "u8"])
@pytest.mark.parametrize("photometric", [tiff.WHITE_IS_ZERO, tiff.BLACK_IS_ZERO])
def test_samples_without_a_stated_range_are_refused_at_the_start(kind: str, photometric: int, order: str) -> None:
    assert refusal(write_tiff(noise(9, 13, kind=kind, below=100), photometric=photometric, order=order))


@pytest.mark.parametrize("kind", ["tiff", "tiff rgb", "png", "png rgb"])
def test_16_bits_that_hold_8_are_refused(kind: str) -> None:
    """Values below 256 in samples of 16 bits are refused, because scaling them to 8 bits would make
    the image black.
    """
    values = noise(9, 13, *([3] if "rgb" in kind else []), kind="u2", below=256)
    is_color = "rgb" in kind
    content = write_tiff(values, photometric=2 if is_color else 1) if "tiff" in kind else write_png(values, color=2 * is_color, depth=16)
    assert "has 16-bit samples that are all below 256: the image would be black in 8 bits" in refusal(content)
    values[0, 0] = 256
    content = write_tiff(values, photometric=2 if is_color else 1) if "tiff" in kind else write_png(values, color=2 * is_color, depth=16)
    assert opened(content).max() == 1


@ORDERS
@pytest.mark.parametrize("planar", [False, True], ids=["interleaved", "planes"])
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize(
    ("samples", "extra"),
    [(3, ()), (4, ()), (4, (0,)), (4, (1,)), (4, (2,)), (5, (2, 0))],
    ids=["rgb", "4", "x", "premultiplied", "a", "ax"],
)
def test_color_tiffs(samples: int, extra: Sequence[int], depth: int, planar: bool, order: str) -> None:
    """Color TIFFs with alpha, unknown extra samples, planes or 16 bits are read correctly or
    refused. Oracle: the samples composited on white.
    """
    values = noise(9, 13, samples, kind=f"u{depth // 8}", below=1 << depth)
    if extra[:1] == (1,):  # a premultiplied color is at most its alpha
        values[:, :, :3] = np.minimum(values[:, :, :3], values[:, :, 3:])
    tags = {tiff.EXTRA: extra} if extra else {}
    content = write_tiff(values, photometric=tiff.RGB, order=order, planar=planar, tags=tags)
    if (planar and samples > 3 and extra != (2,)) or (depth, samples) == (16, 5):
        assert refusal(content)
        return
    levels = (values >> 8 if depth == 16 else values).astype(np.uint8)
    has_alpha = samples > 3 and extra[:1] != (0,)
    wanted = over_white(levels[:, :, :4], premultiplied=extra[:1] == (1,)) if has_alpha else levels[:, :, :3].astype(float)
    assert np.abs(opened(content) - wanted).max() <= (2 if has_alpha else 0)


@ORDERS
@pytest.mark.parametrize("planar", [False, True], ids=["interleaved", "planes"])
@pytest.mark.parametrize("depth", [8, 16])
def test_cmyk_tiffs(depth: int, planar: bool, order: str) -> None:
    values = noise(9, 13, 4, kind=f"u{depth // 8}", below=1 << depth)
    inks = (values >> 8 if depth == 16 else values).astype(float) / 255
    wanted = 255 * (1 - inks[:, :, :3]) * (1 - inks[:, :, 3:])
    content = write_tiff(values, photometric=tiff.CMYK, order=order, planar=planar)
    assert np.abs(opened(content) - wanted).max() <= 1
    assert "inks other than cyan" in refusal(write_tiff(values, photometric=tiff.CMYK, order=order, tags={332: (2,)}))


@ORDERS
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_palette_tiffs(bits: int, order: str) -> None:
    values, colors = noise(9, 13, below=1 << bits), noise(3 << bits, kind="u2", below=65536)
    content = write_tiff(
        values, photometric=tiff.PALETTE, bits=bits if bits < 8 else 0, order=order, tags={tiff.COLOR_MAP: tuple(map(int, colors))}
    )
    np.testing.assert_array_equal(opened(content), (colors.reshape(3, -1).T >> 8)[values])


@ORDERS
@pytest.mark.parametrize("photometric", [tiff.YCBCR, tiff.LAB, 9, 10, 32803, 34892])
def test_other_color_spaces_are_refused(photometric: int, order: str) -> None:
    """Images in CIE L*a*b*, ICC Lab or ITU Lab, camera sensor data, linear raw data, and YCbCr with
    possibly subsampled chroma are refused.
    """
    assert refusal(write_tiff(noise(8, 12, 3), photometric=photometric, order=order))


@ORDERS
@pytest.mark.parametrize("layout", ["strips", "strips in planes", "tiles", "tiles in planes", "tiles of 16 bits", "big", "big of 16 bits"])
def test_tiff_layouts(layout: str, order: str) -> None:
    is_deep = "16 bits" in layout
    values = noise(33, 40, kind="u2", below=65536) if is_deep else noise(33, 40, 3)
    content = write_tiff(
        values, photometric=1 if is_deep else 2, order=order, planar="planes" in layout, big="big" in layout,
        rows_per_strip=7 if "strips" in layout else 0, tile=(16, 16) if "tiles" in layout else (0, 0),
    )  # fmt: skip
    if layout.startswith("big") and order == ">":  # Pillow 13 cannot read big-endian BigTIFF
        assert "begins like a TIFF" in refusal(content)
        return
    np.testing.assert_array_equal(opened(content), gray(values >> 8) if is_deep else values)


COMPRESSIONS = {"none": 1, "lzw": 5, "deflate": 8, "packbits": 32773}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("shape", [(33, 40), (33, 40, 3), (33, 40, 4)], ids=["gray", "rgb", "rgba"])
@pytest.mark.parametrize("kind", ["u1", "u2"])
def test_compressed_tiffs_of_another_writer(kind: str, shape: tuple[int, ...], compression: str) -> None:
    """The files are written by OpenCV's libtiff, with its predictor."""
    values = noise(*shape, kind=kind, below=256 ** int(kind[1]))
    content = cv2.imencode(".tiff", values, [cv2.IMWRITE_TIFF_COMPRESSION, COMPRESSIONS[compression]])[1].tobytes()
    levels = (unchanged(content) >> (8 if kind == "u2" else 0)).astype(np.uint8)
    wanted = gray(levels) if len(shape) == 2 else levels[:, :, :3] if shape[2] == 3 else over_white(levels)
    assert np.abs(opened(content) - wanted.astype(float)).max() <= (2 if shape[2:] == (4,) else 0)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits", "jpeg", "lzma", "zstd"])
def test_compressed_tiffs_of_pillow(compression: str) -> None:
    """Pillow writes JPEG in YCbCr, so colors may differ by the loss of the codec: at most 6."""
    picture = Image.linear_gradient("L").resize((48, 40)).convert("RGB")
    buffer = BytesIO()
    picture.save(buffer, "TIFF", compression=compression)
    wanted = np.asarray(picture).astype(int)
    assert np.abs(opened(buffer.getvalue()) - wanted).max() <= (6 if compression == "jpeg" else 0)


@pytest.mark.parametrize("compression", ["group3", "group4", "tiff_ccitt"])
def test_fax_tiffs(compression: str) -> None:
    picture = Image.fromarray(noise(33, 40, below=2) * np.uint8(255)).convert("1")
    buffer = BytesIO()
    picture.save(buffer, "TIFF", compression=compression)
    np.testing.assert_array_equal(opened(buffer.getvalue()), np.asarray(picture.convert("RGB")))


@pytest.mark.parametrize("compression", [6, 33003, 33005, 34712, 32809, 34676, 65000])
def test_unknown_compressions_are_refused_at_the_start(compression: int) -> None:
    """Old-style JPEG, three kinds of JPEG 2000, ThunderScan, SGI Log, and a compression that does
    not exist.
    """
    assert refusal(write_tiff(noise(9, 13, 3), photometric=tiff.RGB, tags={tiff.COMPRESSION: (compression,)}))


def test_of_several_pages_the_first_is_read() -> None:
    pages = [Image.new("RGB", (8, 6), color) for color in ("red", "blue")]
    buffer = BytesIO()
    pages[0].save(buffer, "TIFF", save_all=True, append_images=pages[1:])
    assert (opened(buffer.getvalue()) == (255, 0, 0)).all()


@pytest.mark.parametrize("how", ["raw", "lzw", "strip missing", "table behind the pixels"])
def test_a_tiff_that_is_cut_off_is_found_at_the_start(how: str) -> None:
    values = noise(64, 64, 3)
    if how == "lzw":
        content = cv2.imencode(".tiff", values, [cv2.IMWRITE_TIFF_COMPRESSION, 5])[1].tobytes()
        table = struct.unpack("<I", content[4:8])[0]
        middle = len(content) // 2
        content = content[:middle] + bytes(500) + content[middle + 500 :] if table > middle else content[:-2000]
    elif how == "strip missing":
        content = write_tiff(values, photometric=2, rows_per_strip=32)
        at = content.rindex(struct.pack("<HHI", tiff.OFFSETS, tiff.LONG, 2))
        content = content[: at + 4] + struct.pack("<II", 1, 8) + content[at + 12 :]
    else:
        whole = write_tiff(values, photometric=2)
        content = (
            whole[:-40]
            if how == "table behind the pixels"
            else whole.replace(struct.pack("<HHII", 273, 4, 1, 8), struct.pack("<HHII", 273, 4, 1, 5000))
        )
    assert refusal(content)


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_gray_pngs_with_a_transparent_level(depth: int) -> None:
    """The transparent level becomes white at each depth, and the other levels are unchanged (public
    case I3).
    """
    values = noise(9, 13, kind="u2", below=1 << depth)
    values[0, 0] = 1
    levels = values >> 8 if depth == 16 else values * (255 // ((1 << depth) - 1))
    np.testing.assert_array_equal(opened(write_png(values, color=GRAY, depth=depth)), gray(levels))
    levels[values == 1] = 255
    np.testing.assert_array_equal(opened(write_png(values, color=GRAY, depth=depth, transparent=[1])), gray(levels))


@pytest.mark.parametrize("depth", [8, 16])
def test_color_pngs(depth: int) -> None:
    values = noise(9, 13, 4, kind="u2", below=1 << depth)
    values[0, 0] = 7
    levels = values >> (depth - 8)
    np.testing.assert_array_equal(opened(write_png(values[:, :, :3], color=COLOR, depth=depth)), levels[:, :, :3])
    for color, samples in ((GRAY_ALPHA, 2), (COLOR_ALPHA, 4)):
        got = opened(write_png(values[:, :, :samples], color=color, depth=depth))
        assert np.abs(got - over_white(levels[:, :, :samples])).max() <= 1
    with_color = write_png(values[:, :, :3], color=COLOR, depth=depth, transparent=[7, 7, 7])
    if depth == 16:
        assert "16-bit samples with one transparent color" in refusal(with_color)
        return
    levels[(values[:, :, :3] == 7).all(axis=2)] = 255
    np.testing.assert_array_equal(opened(with_color), levels[:, :, :3])


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_indexed_pngs(depth: int) -> None:
    values, colors = noise(9, 13, below=1 << depth), noise(1 << depth, 3)
    content = write_png(values, color=INDEXED, depth=depth, palette=colors.tobytes(), transparent=[255, 0])
    wanted = colors[values]
    wanted[values == 1] = 255
    np.testing.assert_array_equal(opened(content), wanted)


def test_an_interlaced_png_is_the_same() -> None:
    """The file is written by hand with Adam7 (PNG 1.2, 2.6): seven reduced images, one after the
    other.
    """
    values = noise(9, 13, 3)
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    parts = [values[y::dy, x::dx] for y, x, dy, dx in passes]
    data = b"".join(b"\0" + row.tobytes() for part in parts if part.size for row in part)
    head = make_chunk(b"IHDR", struct.pack(">IIBBBBB", 13, 9, 8, COLOR, 0, 0, 1))
    content = b"\x89PNG\r\n\x1a\n" + head + make_chunk(b"IDAT", zlib.compress(data)) + make_chunk(b"IEND", b"")
    np.testing.assert_array_equal(opened(content), values)


@pytest.mark.parametrize("has_marker", [True, False])
def test_cmyk_jpegs(has_marker: bool) -> None:
    """CMYK JPEGs are stored inverted (Adobe's Technical Note 5116). OpenCV and Pillow both assume
    this even without Adobe's APP14 marker.
    """
    inks = np.zeros((16, 16, 4), np.uint8)
    inks[:, :, 1:3] = 255  # magenta and yellow ink make red
    buffer = BytesIO()
    Image.fromarray(inks, "CMYK").save(buffer, "JPEG", quality=95)
    content = buffer.getvalue()
    marker = content.index(b"\xff\xee")
    if not has_marker:
        content = content[:marker] + content[marker + 2 + int.from_bytes(content[marker + 2 : marker + 4], "big") :]
    assert np.abs(opened(content).astype(int) - (255, 0, 0)).max() <= 3
    assert np.abs(opened(content).astype(int) - unchanged(content)).max() <= 3


@pytest.mark.parametrize("form", ["WEBP", "GIF", "PNG"])
def test_of_a_moving_picture_the_first_frame_is_read(form: str) -> None:
    frames = [Image.new("RGB", (8, 6), color) for color in ("red", "blue", "lime")]
    buffer = BytesIO()
    options = {"lossless": True} if form == "WEBP" else {}
    frames[0].save(buffer, form, save_all=True, append_images=frames[1:], duration=50, **options)
    assert (opened(buffer.getvalue()) == (255, 0, 0)).all()


def bmp(rows: bytes, *, width: int, height: int, bits: int, masks: Sequence[int] = (), info: int = 40) -> bytes:
    """Return a BMP without compression, or with bit fields if masks are given (BITMAPINFOHEADER,
    BITMAPV4HEADER).
    """
    table = struct.pack("<IiiHHIIiiII", info, width, height, 1, bits, 3 if masks else 0, len(rows), 2835, 2835, 0, 0)
    table += struct.pack(f"<{len(masks)}I", *masks)
    table = table.ljust(max(info, len(table)), b"\0")
    start = 14 + len(table)
    return b"BM" + struct.pack("<IHHI", start + len(rows), 0, 0, start) + table + rows


@pytest.mark.parametrize("is_top_down", [False, True])
def test_bmps(is_top_down: bool) -> None:
    """BMPs with 16 bits (5-5-5 and 5-6-5), 24 bits, and 32 bits with and without alpha, stored from
    the bottom row or from the top row.
    """
    values = noise(6, 8, 4)
    stored, height = (values, -6) if is_top_down else (values[::-1], 6)
    bgra = stored[:, :, [2, 1, 0, 3]].tobytes()
    np.testing.assert_array_equal(opened(bmp(stored[:, :, 2::-1].tobytes(), width=8, height=height, bits=24)), values[:, :, :3])
    np.testing.assert_array_equal(opened(bmp(bgra, width=8, height=height, bits=32)), values[:, :, :3])
    masks = (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    with_alpha = opened(bmp(bgra, width=8, height=height, bits=32, masks=masks, info=108))
    assert np.abs(with_alpha - over_white(values)).max() <= 1
    for green, masks in ((5, ()), (6, (0xF800, 0x7E0, 0x1F))):
        red5, green_n, blue5 = (stored[:, :, each].astype(int) >> (8 - n) for each, n in ((0, 5), (1, green), (2, 5)))
        words = ((red5 << (5 + green)) | (green_n << 5) | blue5).astype("<u2")
        content = bmp(words.tobytes(), width=8, height=height, bits=16, masks=masks)
        assert np.abs(opened(content).astype(int) - unchanged(content)[:, :, :3]).max() <= 7  # OpenCV shifts, Pillow scales
        assert np.abs(opened(content).astype(int) - values[:, :, :3]).max() <= 8


def test_color_profiles_are_not_applied() -> None:
    values = noise(6, 8, 3)
    for form in ("PNG", "TIFF"):
        buffer = BytesIO()
        Image.fromarray(values).save(buffer, form, icc_profile=b"no profile at all")
        np.testing.assert_array_equal(opened(buffer.getvalue()), values)


@pytest.mark.parametrize("size", [(0, 4), (4, 0)])
def test_a_picture_without_pixels_is_refused(size: tuple[int, int]) -> None:
    head = make_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, COLOR, 0, 0, 0))
    assert refusal(b"\x89PNG\r\n\x1a\n" + head + make_chunk(b"IDAT", b"") + make_chunk(b"IEND", b""))
    assert refusal(bmp(b"", width=size[0], height=size[1], bits=24))
