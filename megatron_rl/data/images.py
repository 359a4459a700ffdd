"""A picture where it lies: a file, or the bytes of a row. Its size is read from the header; it is decoded when it is opened, not before."""

import base64
import binascii
import hashlib
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from PIL import Image
from PIL.Image import Image as Picture
from PIL.Image import Transpose
from PIL.TiffImagePlugin import TiffImageFile

from megatron_rl.types import HostFault, LastingFault

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 89_478_485
"""Of a picture as it is stored; Pillow warns of a decompression bomb above it."""
MAX_ASPECT = 100
"""Qwen's image processor refuses pictures of more than 200 (smart_resize, transformers 5.19), and what it rounds down may be twice as long
as before: a server of vLLM looks at its result again."""
SUFFIXES = ("", ".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
MAX_FILE_BYTES = 256 << 20
"""Of a picture as it is stored: 89 million pixels without compression."""
MAX_SCANS = 64
"""Passes over all pixels that a JPEG asks for, each in a few bytes; encoders make some ten."""
UNREADABLE = (OSError, ValueError, TypeError, SyntaxError, EOFError, MemoryError, struct.error, Image.DecompressionBombError)
"""What Pillow 13 raises on bytes that are no picture, or half of one."""
MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")
"""What files of FORMATS begin with."""
_JPEG, _SCAN = b"\xff\xd8\xff", b"\xff\xda"
_ENDS = {b"\x89PNG": b"IEND\xaeB`\x82", b"\xff\xd8\xff": b"\xff\xd9", b"GIF8": b";"}
"""What a file ends with that begins so."""
_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
"""EXIF's orientation -> what undoes it (EXIF 2.3, tag 0x0112; as Pillow's exif_transpose)."""


@dataclass(slots=True, frozen=True)
class StoredImage:
    source: Path | bytes = field(repr=False)
    where: str
    """For messages: `train.parquet row 17: images[0]`."""
    sha256: str = ""
    """Of the file's bytes, where the row names the picture by it."""

    def read(self) -> bytes:
        """The bytes as they are stored. The rollout fails where they cannot be had:

        HostFault: the disk is in trouble. LastingFault: the file is gone, or another, since the start.
        """
        try:
            return self.content()
        except (FileNotFoundError, ValueError) as error:
            raise LastingFault(f"{self.where}: cannot be opened ({error})") from error
        except OSError as error:
            raise HostFault(f"{self.where}: cannot be read ({error})") from error

    def open(self) -> Picture:
        """The picture as RGB, upright, what is transparent on white. As `read`; LastingFault, too: it is broken since the start."""
        content = self.read()
        try:
            num_scans = content.count(_SCAN) if content.startswith(_JPEG) else 0
            if num_scans > MAX_SCANS:
                raise ValueError(f"a JPEG of {num_scans} scans, more than {MAX_SCANS}; save it anew")
            with self._checked(BytesIO(content)) as picture:
                return flatten(picture)
        except UNREADABLE as error:
            raise LastingFault(f"{self.where}: cannot be opened ({error})") from error

    def size(self) -> tuple[int, int]:
        """Width and height of what open() gives, from the header. ValueError: no picture, or one that is not to be decoded."""
        try:
            with self._checked(BytesIO(self.source) if isinstance(self.source, bytes) else self.source) as picture:
                is_turned = isinstance(picture, TiffImageFile) and picture.tag_v2.get(_ORIENTATION) in _SIDEWAYS  # in its size already
                return picture.size[::-1] if (_orientation(picture) in _SIDEWAYS) != is_turned else picture.size
        except UNREADABLE as error:
            raise ValueError(f"{self.where}: {error}") from error

    def require_whole(self) -> None:
        """ValueError: the file is cut off. Its end tells; one that does not end as its format has it is decoded, and need not be broken.

        A TIFF has no such end, and what is broken in the middle is found by open().
        """
        if isinstance(self.source, bytes):
            first, last, length = self.source[:12], self.source[-12:], len(self.source)
        else:
            with self.source.open("rb") as file:
                first, length = file.read(12), file.seek(0, os.SEEK_END)
                file.seek(-min(length, 12), os.SEEK_END)
                last = file.read()
        if not ends_well(first, last, length):
            try:
                self.open()
            except HostFault as fault:
                raise ValueError(str(fault)) from fault

    def content(self) -> bytes:
        """The bytes as they are stored. ValueError: not those that the hash names."""
        if isinstance(self.source, Path):
            _check_bytes(self.source.stat().st_size)
        content = self.source if isinstance(self.source, bytes) else self.source.read_bytes()
        _check_bytes(len(content))
        if self.sha256 and hashlib.sha256(content).hexdigest() != self.sha256:
            raise ValueError(f"{self.source} does not have the SHA-256 that names it")
        return content

    def _checked(self, source: Path | BytesIO) -> Picture:
        if isinstance(source, Path):
            _check_bytes(source.stat().st_size)
        picture = Image.open(source, formats=FORMATS)
        width, height = picture.size
        if width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT * min(width, height):
            picture.close()
            raise ValueError(f"{width}x{height} pixels: at most {MAX_PIXELS}, and one side {MAX_ASPECT} times the other; make it smaller")
        return picture


def _check_bytes(size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{size} bytes, more than {MAX_FILE_BYTES}; make it smaller")


def ends_well(first: bytes, last: bytes, length: int) -> bool:
    """Whether a file of this length with these first and last 12 bytes ends as its format says."""
    if first.startswith(b"RIFF"):
        return int.from_bytes(first[4:8], "little") + 8 <= length
    if first.startswith(b"BM"):
        return int.from_bytes(first[2:6], "little") <= length
    return all(last.endswith(end) for magic, end in _ENDS.items() if first.startswith(magic))


def flatten(picture: Picture) -> Picture:
    """RGB, upright as its EXIF says, what is transparent on white."""
    turn = None if isinstance(picture, TiffImageFile) else _UPRIGHT.get(_orientation(picture))  # Pillow turns a TIFF when it decodes it
    upright = picture if turn is None else picture.transpose(turn)
    upright.load()
    if upright.mode.startswith("I"):  # 16 bits of gray, which convert() would clip
        return upright.point(lambda value: value / 256).convert("L").convert("RGB")
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    layer = upright.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _orientation(picture: Picture) -> object:
    """What the header says, whatever it is. EXIF behind a PNG's pixels is not read: PngImageFile.getexif would decode them for it."""
    return Picture.getexif(picture).get(_ORIENTATION)


def stored_image(value: object, *, folder: Path, where: str, roots: Sequence[Path] = ()) -> StoredImage:
    """The picture that a row names: {"bytes": ...}, {"path": ...}, bytes, base64, a path, the SHA-256 of a file in `folder`, a data: URL.

    Bytes in JSON are base64. Text that names a file is a path, even where it might be base64. ValueError: none of these, no such file, or
    one that lies, links followed, neither below `folder` nor below one of `roots`: rows may be a stranger's, and the disk is the user's.
    """
    if isinstance(value, Mapping):
        if not value.keys() & {"bytes", "path"}:
            raise ValueError(f'{where}: must have "bytes" or "path", has {shortened(", ".join(map(str, value))) or "nothing"}')
        value = _decoded(value["bytes"], where) if "bytes" in value else value["path"]
    if isinstance(value, bytes):
        return StoredImage(value, where)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: must be a path, bytes or a SHA-256, is {type(value).__name__}")
    if value.startswith("data:"):
        return StoredImage(_decoded(value.partition("base64,")[2], where), where)
    if re.fullmatch("[0-9a-f]{64}", value):
        return StoredImage(at_home(_named_by_hash(value, folder, where), folder, roots, where), where, sha256=value)
    if re.match("[a-z][a-z0-9+.-]*://", value):
        raise ValueError(f"{where}: {shortened(value)} is a URL, and URLs are not read; download the picture and give its path")
    path = folder / value
    if os.path.isfile(path):  # Path.is_file raises where a name is too long
        return StoredImage(at_home(path, folder, roots, where), where)
    if content := _picture_in_base64(value):
        return StoredImage(content, where)
    raise ValueError(f"{where}: no such file {folder / shortened(value)}; task.data.images is the folder that relative paths start from")


def at_home(path: Path, folder: Path, roots: Sequence[Path], where: str) -> Path:
    """The path, which lies below `folder` or one of `roots`, links followed. ValueError: it does not."""
    real = os.path.realpath(path)
    if not any(real.startswith(os.path.join(os.path.realpath(home), "")) for home in (folder, *roots)):
        remedy = f"task.data.image_roots=[{os.path.dirname(real)}] lets rows name the pictures there"
        raise ValueError(f"{where}: {shortened(str(path))} lies outside of {folder}, at {shortened(real)}; {remedy}")
    return path


def shortened(text: str) -> str:
    """For messages: at most 80 characters, the middle left out."""
    return text if len(text) <= 80 else f"{text[:38]}...{text[-39:]}"


def _picture_in_base64(text: str) -> bytes:
    """What the text stands for, if that begins as a picture does; else nothing."""
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError:
        return b""
    return content if content.startswith(MAGIC) else b""


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
