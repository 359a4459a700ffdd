"""A picture where it lies: a file, or the bytes of a row. Its size is read from the header; it is decoded when it is opened, not before."""

import base64
import binascii
import hashlib
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps
from PIL.Image import Image as Picture

from megatron_rl.types import HostFault

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 89_478_485
"""Of a picture as it is stored; Pillow warns of a decompression bomb above it."""
MAX_ASPECT = 200
"""Qwen's image processor refuses longer pictures (smart_resize, transformers 5.19)."""
SUFFIXES = ("", ".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError)
"""What Pillow 13 raises on bytes that are no picture, or half of one."""
_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)


@dataclass(slots=True, frozen=True)
class StoredImage:
    source: Path | bytes = field(repr=False)
    where: str
    """For messages: `train.parquet row 17: images[0]`."""
    sha256: str = ""
    """Of the file's bytes, where the row names the picture by it."""

    def open(self) -> Picture:
        """The picture as RGB, upright, what is transparent on white. HostFault: gone or broken since the start; the rollout fails."""
        try:
            content = self.content()
            with self._checked(BytesIO(content)) as picture:
                return flatten(picture)
        except _UNREADABLE as error:
            raise HostFault(f"{self.where}: cannot be opened ({error})") from error

    def size(self) -> tuple[int, int]:
        """Width and height of what open() gives, from the header. ValueError: no picture, or one that is not to be decoded."""
        try:
            with self._checked(BytesIO(self.source) if isinstance(self.source, bytes) else self.source) as picture:
                has_exif = picture.format != "PNG" or "exif" in picture.info  # PngImageFile.getexif decodes the picture to look behind it
                sideways = has_exif and picture.getexif().get(_ORIENTATION) in _SIDEWAYS
                return picture.size[::-1] if sideways else picture.size
        except _UNREADABLE as error:
            raise ValueError(f"{self.where}: {error}") from error

    def content(self) -> bytes:
        """The bytes as they are stored. ValueError: not those that the hash names."""
        content = self.source if isinstance(self.source, bytes) else self.source.read_bytes()
        if self.sha256 and hashlib.sha256(content).hexdigest() != self.sha256:
            raise ValueError(f"{self.source} does not have the SHA-256 that names it")
        return content

    def _checked(self, source: Path | BytesIO) -> Picture:
        picture = Image.open(source, formats=FORMATS)
        width, height = picture.size
        if width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT * min(width, height):
            picture.close()
            raise ValueError(f"{width}x{height} pixels: at most {MAX_PIXELS}, and one side {MAX_ASPECT} times the other; make it smaller")
        return picture


def flatten(picture: Picture) -> Picture:
    """RGB, upright as its EXIF says, what is transparent on white."""
    upright = ImageOps.exif_transpose(picture)
    if upright.mode.startswith("I"):  # 16 bits of gray, which convert() would clip
        return upright.point(lambda value: value / 256).convert("L").convert("RGB")
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    layer = upright.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def stored_image(value: object, *, folder: Path, where: str) -> StoredImage:
    """The picture that a row names: {"bytes": ...}, {"path": ...}, bytes, a path, the SHA-256 of a file in `folder`, or a data: address.

    Bytes in JSON are base64. ValueError: none of these, or no such file.
    """
    if isinstance(value, Mapping):
        if not value.keys() & {"bytes", "path"}:
            raise ValueError(f'{where}: must have "bytes" or "path", has {", ".join(map(str, value)) or "nothing"}')
        value = _decoded(value["bytes"], where) if "bytes" in value else value["path"]
    if isinstance(value, bytes):
        return StoredImage(value, where)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: must be a path, bytes or a SHA-256, is {type(value).__name__}")
    if value.startswith("data:"):
        return StoredImage(_decoded(value.partition("base64,")[2], where), where)
    if re.fullmatch("[0-9a-f]{64}", value):
        return StoredImage(_named_by_hash(value, folder, where), where, sha256=value)
    path = folder / value
    try:
        exists = path.is_file()
    except ValueError:  # a null byte
        exists = False
    if not exists:
        raise ValueError(f"{where}: no such file {path}; task.data.images is the folder that relative paths start from")
    return StoredImage(path, where)


def _decoded(value: object, where: str) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, binascii.Error, ValueError) as error:
        raise ValueError(f"{where}: bytes must be bytes, or base64 in JSON ({error})") from error


def _named_by_hash(digest: str, folder: Path, where: str) -> Path:
    for path in (folder / part / f"{digest}{suffix}" for part in ("", digest[:2]) for suffix in SUFFIXES):
        if path.is_file():
            return path
    raise ValueError(f"{where}: {folder} has no file named by the SHA-256 {digest}; task.data.images is the folder of such files")
