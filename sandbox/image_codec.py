"""Images returned by a box: limits, encoding as plain PNG, and validation of untrusted PNGs."""

import struct
import zlib
from io import BytesIO

from PIL import Image

from megatron_rl_sandbox.records import BoxLimits

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_CHANNELS = {0: 1, 2: 3, 6: 4}
"""Bytes per pixel, keyed by accepted PNG color type (gray, RGB, RGBA; 8 bits per channel)."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
PIL_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
PLAIN_MODES = ("L", "RGB", "RGBA")
MAX_PNG_CHUNKS = 1000
"""Maximum number of chunks in a PNG.

Pillow writes one chunk per 64 KiB. Without this limit, a PNG within `BoxLimits.image_bytes` could
have half a million empty chunks, which would take long to parse.
"""


def check_image_size(*, width: int, height: int, limits: BoxLimits) -> str | None:
    """Return None if the image size is allowed, else the reason as a message for the model."""
    shape = f"{width}x{height} pixels"
    shorter, longer = sorted((width, height))
    if shorter < limits.image_side:
        return f"{shape}: the shorter side has less than {limits.image_side}; enlarge it"
    if longer > limits.image_aspect * shorter:
        return f"{shape}: one side is more than {limits.image_aspect:g} times the other"
    if width * height > limits.image_pixels:
        return f"{shape}: more than {limits.image_pixels} pixels; make it smaller"
    return None


class ImageBudget:
    """Budget for the number, pixels and PNG bytes of returned images, per call and in total.

    The pool uses its own instance to enforce the budget. The box has another instance, which only
    avoids drawing and encoding images that the pool would drop.
    """

    def __init__(self, limits: BoxLimits) -> None:
        self._limits = limits
        self._call = self._total = (0, 0, 0)

    def begin_call(self) -> None:
        """Reset the counts of the current call."""
        self._call = (0, 0, 0)

    def check_image(self, *, pixels: int, num_bytes: int = 0) -> str | None:
        """Return None if the budget allows the image, else the reason as a message for the model.

        To check an image before encoding it, omit `num_bytes`.
        """
        limits = self._limits
        for used, most, when in (
            (self._call, (limits.images, limits.pixels, limits.png_bytes), "per call"),
            (self._total, (limits.images_total, limits.pixels_total, limits.png_bytes_total), "in total"),
        ):
            for count, one, bound, what in zip(used, (1, pixels, num_bytes), most, ("images", "pixels", "bytes as PNG"), strict=True):
                if count + one > bound:
                    return f"only {bound} {what} are returned {when}"
        return None

    def count_image(self, *, pixels: int, num_bytes: int) -> None:
        """Add a returned image to the counts of the current call and of the box."""
        one = (1, pixels, num_bytes)
        self._call, self._total = (tuple(map(sum, zip(used, one, strict=True))) for used in (self._call, self._total))


def encode_png(picture: Image.Image) -> bytes:
    """Encode an image as a PNG that consists only of the header, pixel data and end chunks.

    At compression level 1, the strategy Z_RLE is faster than zlib's default strategy and makes PNGs
    of photographs one sixth smaller.
    """
    plain = picture if picture.mode in PLAIN_MODES else picture.convert("RGBA" if picture.has_transparency_data else "RGB")
    bare = Image.frombytes(plain.mode, plain.size, plain.tobytes()) if plain.info else plain
    buffer = BytesIO()
    bare.save(buffer, format="PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return buffer.getvalue()


def check_png(png: bytes) -> tuple[int, int]:
    """Validate a plain PNG and return its width and height.

    A valid PNG consists of header, data and end chunks with correct checksums, and contains exactly
    the number of pixels stated in its header. Therefore, any decoder can read a valid PNG. This
    function decompresses the pixels, so pass the size from `read_png_size` to `check_image_size`
    first.

    Raises:
        ValueError: The PNG is invalid.
    """
    width, height = read_png_size(png)
    kinds: list[bytes] = []
    data: list[bytes] = []
    place = len(PNG_SIGNATURE)
    while place < len(png):
        if len(kinds) == MAX_PNG_CHUNKS:
            raise ValueError(f"more than {MAX_PNG_CHUNKS} chunks")
        if place + 12 > len(png):
            raise ValueError("a chunk is cut short")
        length, kind = struct.unpack_from("!I4s", png, place)
        if place + 12 + length > len(png):
            raise ValueError("a chunk is cut short")
        body = png[place + 8 : place + 8 + length]
        if struct.unpack_from("!I", png, place + 8 + length)[0] != zlib.crc32(body, zlib.crc32(kind)):
            raise ValueError("a checksum is wrong")
        kinds.append(kind)
        data += [body] if kind == b"IDAT" else []
        place += 12 + length
    if kinds != [b"IHDR", *[b"IDAT"] * len(data), b"IEND"] or not data:
        raise ValueError("chunks other than header, data and end")
    row = 1 + width * PNG_CHANNELS[png[25]]  # each row starts with a filter byte, 0 to 4
    inflater = zlib.decompressobj()
    try:
        pixels = inflater.decompress(b"".join(data), row * height + 1)
    except zlib.error as error:
        raise ValueError(f"pixel data: {error}") from error
    if len(pixels) != row * height or not inflater.eof or max(pixels[::row]) > 4:
        raise ValueError("not the pixels that the header announces")
    return width, height


def read_png_size(png: bytes) -> tuple[int, int]:
    """Read the width and height from the header of a plain PNG.

    A plain PNG has 8 bits per channel and is not interlaced.

    Raises:
        ValueError: The data is not a plain PNG.
    """
    if len(png) < 57 or png[:8] != PNG_SIGNATURE or png[8:16] != b"\x00\x00\x00\rIHDR":
        raise ValueError("not a PNG")
    width, height, depth, color, compression, filtering, interlace = struct.unpack_from("!IIBBBBB", png, 16)
    if depth != 8 or color not in PNG_CHANNELS or compression or filtering or interlace or not width or not height:
        raise ValueError("not a plain PNG")
    return width, height
