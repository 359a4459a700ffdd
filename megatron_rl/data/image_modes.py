"""Converts decoded images to 8-bit RGB, and rejects images that Pillow would convert incorrectly.

Samples of 16 or 12 bits are reduced to 8 bits by dropping the low 8 or 4 bits, respectively. Color
profiles are not applied. The conversion with Pillow 13.0 was checked against raw samples and OpenCV
5.0 (tests/data/test_data_image_modes.py).
"""

import math
from collections.abc import Mapping

import numpy as np
from PIL import Image, TiffImagePlugin
from PIL.Image import Image as Picture
from PIL.Image import Transpose
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

TiffImagePlugin.READ_LIBTIFF = True
"""Makes Pillow decode TIFF files with libtiff.

Pillow's own reader treats 16-bit planes as 8-bit and leaves missing strips black. libtiff decodes
16-bit planes correctly and rejects files with missing strips.
"""
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B", "I;16L")
"""Pillow modes that can be converted to RGB without choosing a value range.

The modes I and F (32 bits) and LAB are excluded.
"""
_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
_UPRIGHT: Mapping[object, Transpose] = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
"""Maps each EXIF orientation (EXIF 2.3, tag 0x0112) to the transposition that undoes it.

The mapping is the same as in Pillow's exif_transpose.
"""
_UNSIGNED, _JPEG, _YCBCR, _RGB, _CMYK, _ALPHA = 1, 7, 6, 2, 5, 2
"""Values of the TIFF tags SampleFormat, Compression, PhotometricInterpretation and ExtraSamples."""
_SAMPLE_FORMATS = {2: "signed integers", 3: "floating-point numbers"}
_INK_SET, _CMYK_INKS = 332, 1
SAVE_AGAIN = "save it as 8-bit RGB or gray, scaled as the model should see it"


def convert_to_rgb(picture: Picture) -> Picture:
    """Return the image as RGB with its EXIF orientation applied and transparent pixels on white.

    Raises:
        ValueError: the image is of a kind that cannot be converted, or its 16-bit samples are so
            small that all pixels would be black.
    """
    require_known_kind(picture)
    bits = sample_bits(picture)
    is_inverted = isinstance(picture, TiffImageFile) and picture.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
    turn = None if isinstance(picture, TiffImageFile) else _UPRIGHT.get(orientation(picture))  # Pillow rotates a TIFF when it decodes it
    picture.load()
    upright = picture if turn is None else picture.transpose(turn)
    if upright.mode.startswith("I"):
        return _gray_of_16_bits(upright, bits=bits, is_inverted=is_inverted)
    if not upright.has_transparency_data:
        flat = upright.convert("RGB")
    else:
        if upright.mode == "L" and bits < 8 and "transparency" in upright.info:  # Pillow scales the pixels only
            upright.info["transparency"] *= 255 // ((1 << bits) - 1)
        layer = upright.convert("RGBA")
        flat = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    if bits > 8:
        _require_visible(flat.getbbox() is not None, bits)
    return flat


def require_known_kind(picture: Picture) -> None:
    """Raise ValueError for an image that Pillow would decode with wrong colors.

    Only the header is read.
    """
    if isinstance(picture, TiffImageFile):
        _require_known_tiff(picture)
    if picture.mode not in MODES:
        what = "32-bit samples of unknown range" if picture.mode in ("I", "F") else f"colors of mode {picture.mode}"
        raise ValueError(f"has {what}; {SAVE_AGAIN}")
    if picture.mode == "RGB" and sample_bits(picture) > 8 and "transparency" in picture.info:
        raise ValueError("has 16-bit samples with one transparent color (tRNS); save it with an alpha channel")


def _require_known_tiff(picture: TiffImageFile) -> None:
    tags = picture.tag_v2
    photometric = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION, 0)
    compression, extra = tags.get(TiffImagePlugin.COMPRESSION, 1), tags.get(TiffImagePlugin.EXTRASAMPLES, ())
    for kind in tags.get(TiffImagePlugin.SAMPLEFORMAT, (_UNSIGNED,)):
        if kind != _UNSIGNED:
            raise ValueError(f"has samples that are {_SAMPLE_FORMATS.get(kind, f'of the format {kind}')}; {SAVE_AGAIN}")
    if photometric == _YCBCR and compression != _JPEG:
        raise ValueError(f"has YCbCr samples that are not compressed as JPEG; {SAVE_AGAIN}")
    if photometric == _CMYK and tags.get(_INK_SET, _CMYK_INKS) != _CMYK_INKS:
        raise ValueError(f"uses inks other than cyan, magenta, yellow and black; {SAVE_AGAIN}")
    num_colors = {_RGB: 3, _YCBCR: 3, _CMYK: 4}.get(photometric, 1)
    is_planar = tags.get(TiffImagePlugin.PLANAR_CONFIGURATION, 1) == 2
    num_samples = tags.get(TiffImagePlugin.SAMPLESPERPIXEL, 1)
    if is_planar and num_samples > num_colors and not (photometric == _RGB and num_samples == 4 and extra == (_ALPHA,)):
        raise ValueError(f"has {num_samples} separate planes, but only {num_colors} of them are colors; {SAVE_AGAIN}")
    _require_all_pieces(tags, num_planes=num_samples if is_planar else 1)


def _require_all_pieces(tags: TiffImagePlugin.ImageFileDirectory_v2, *, num_planes: int) -> None:
    """Raise ValueError if a TIFF has fewer strips or tiles than its dimensions require.

    For a missing strip or tile, libtiff would read data from the start of the file.
    """
    width, height = tags[TiffImagePlugin.IMAGEWIDTH], tags[TiffImagePlugin.IMAGELENGTH]
    offsets = tags.get(TiffImagePlugin.STRIPOFFSETS) or tags.get(TiffImagePlugin.TILEOFFSETS, ())
    rows = min(tags.get(TiffImagePlugin.TILELENGTH) or tags.get(TiffImagePlugin.ROWSPERSTRIP, height), height)
    columns = min(tags.get(TiffImagePlugin.TILEWIDTH, width), width)
    num_pieces = num_planes * math.ceil(height / rows) * math.ceil(width / columns)
    if len(offsets) < num_pieces:
        raise ValueError(f"contains only {len(offsets)} of {num_pieces} strips or tiles; the file is damaged")


def sample_bits(picture: Picture) -> int:
    """Return the number of bits per sample in the file: 1, 2, 4, 8, 12 or 16.

    Call this function before the image is decoded.
    """
    if isinstance(picture, TiffImageFile):
        return max(picture.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,)))
    if isinstance(picture, PngImageFile) and picture.tile:
        depth = str(picture.tile[0].args).rpartition(";")[2]  # Pillow's raw modes: L, L;2, RGB;16B
        return {"1": 1, "2": 2, "4": 4, "16B": 16}.get(depth, 8)
    return 16 if picture.mode.startswith("I") else 8


def orientation(picture: Picture) -> object:
    """Return the EXIF orientation stored in the header, or None.

    EXIF data stored after the pixels of a PNG is ignored, because PngImageFile.getexif would decode
    the image to find it.
    """
    return Picture.getexif(picture).get(_ORIENTATION)


def upright_size(picture: Picture) -> tuple[int, int]:
    """Compute from the header the width and height that `convert_to_rgb` would produce."""
    is_turned = isinstance(picture, TiffImageFile) and picture.tag_v2.get(_ORIENTATION) in _SIDEWAYS  # already rotated
    width, height = picture.size
    return (height, width) if (orientation(picture) in _SIDEWAYS) != is_turned else (width, height)


def _gray_of_16_bits(picture: Picture, *, bits: int, is_inverted: bool) -> Picture:
    """Convert gray samples of `bits` bits to RGB.

    Pixels with the transparent sample value become white.
    """
    values_HW = np.asarray(picture).astype(np.uint16)
    levels_HW = (values_HW >> (bits - 8)).astype(np.uint8)
    _require_visible(bool(levels_HW.any()) or not values_HW.any(), bits)
    if is_inverted:
        levels_HW = 255 - levels_HW
    if "transparency" in picture.info:
        levels_HW[values_HW == picture.info["transparency"]] = 255
    return Image.fromarray(levels_HW).convert("RGB")


def _require_visible(is_visible: bool, bits: int) -> None:
    if not is_visible:
        raise ValueError(f"has {bits}-bit samples that are all below {1 << (bits - 8)}: the image would be black in 8 bits; {SAVE_AGAIN}")
