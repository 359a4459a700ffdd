"""Images that rows provide as files or as bytes.

The size is read from the header; `StoredImage.open` decodes the pixels.
"""

import hashlib
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from PIL import Image
from PIL.Image import Image as Picture

from megatron_rl.data.image_bytes import (
    FORMATS,
    HEAD_BYTES,
    decode_base64,
    decode_base64_image,
    decode_data_url,
    describe_bytes,
    picture_format,
)
from megatron_rl.data.image_modes import convert_to_rgb, require_known_kind, upright_size
from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.io.bounded_files import open_regular, read_bytes

MAX_PIXELS = 89_478_485
"""Maximum number of pixels per image; for larger images, Pillow warns of a decompression bomb."""
MAX_ASPECT = 100
"""Maximum ratio of an image's longer side to its shorter side.

Qwen's image processor rejects ratios above 200 (smart_resize, transformers 5.19). The processor's
rounding may double the ratio, and a vLLM server checks the resized image again.
"""
SUFFIXES = ("", ".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
MAX_FILE_BYTES = 256 << 20
"""Maximum size of a stored image in bytes, enough for 89 million uncompressed RGB pixels."""
MAX_SCANS = 64
"""Maximum number of scans in a JPEG.

A scan may take only a few bytes in the file but requires a decoding pass over all pixels. Encoders
write about ten scans.
"""
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    SyntaxError,
    LookupError,
    ArithmeticError,
    EOFError,
    MemoryError,
    struct.error,
    Image.DecompressionBombError,
)
"""Exceptions that Pillow 13 raises for bytes that are not an image or not a complete image."""
_HEADER, _PNG_DEPTH = 32, 24
"""Number of bytes read from the start of a file, and offset of a PNG's bit depth (PNG 1.2, 4.1.1).
"""
_JPEG, _SCAN = b"\xff\xd8\xff", b"\xff\xda"
_END_MARKERS = {b"\x89PNG": b"IEND\xaeB`\x82", b"\xff\xd8\xff": b"\xff\xd9", b"GIF8": b";"}
"""Maps the first bytes of a file format to the last bytes of a complete file in this format."""


@dataclass(slots=True, frozen=True)
class StoredImage:
    """An image that a row provides as a file or as bytes."""

    source: Path | bytes = field(repr=False)
    where: str
    """Location used in messages, such as `train.parquet row 17: images[0]`."""
    sha256: str = ""
    """SHA-256 of the file's bytes if the row names the image by its hash, else ""."""

    def read(self) -> bytes:
        """Return the stored bytes.

        Raises:
            InfraError: reading from disk failed.
            PermanentInfraError: the file was removed or replaced after the run started.
        """
        try:
            return self.load_bytes()
        except (FileNotFoundError, ValueError) as error:
            raise PermanentInfraError(f"{self.where}: cannot be opened ({error})") from error
        except OSError as error:
            raise InfraError(f"{self.where}: cannot be read ({error})") from error

    def open(self) -> Picture:
        """Return the decoded image as RGB, upright, with transparent pixels on white.

        Raises:
            InfraError: reading from disk failed.
            PermanentInfraError: the file was removed, replaced or damaged after the run started.
        """
        content = self.read()
        try:
            num_scans = content.count(_SCAN) if content.startswith(_JPEG) else 0
            if num_scans > MAX_SCANS:
                raise ValueError(f"a JPEG with {num_scans} scans, more than {MAX_SCANS}; save the image again")
            with _open_image(BytesIO(content)) as picture:
                return convert_to_rgb(picture)
        except UNREADABLE as error:
            raise PermanentInfraError(f"{self.where}: cannot be opened ({error})") from error

    def size(self) -> tuple[int, int]:
        """Read the header and return the width and height of the image that `open` would return.

        Raises:
            ValueError: the file is not an image, or is an image that must not be decoded.
        """
        try:
            with self._open_file() as file, _open_image(file, name=self._name) as picture:
                return upright_size(picture)
        except UNREADABLE as error:
            raise ValueError(f"{self.where}: {error}") from error

    def check_complete(self) -> None:
        """Raise ValueError if the file is truncated.

        For most formats, the last bytes of the file are checked. A file with an unusual end is
        decoded, because it may still be complete. TIFF files are always decoded, because they have
        no fixed last bytes. 16-bit PNG files are always decoded to detect images that would be
        black after the conversion to 8 bits. Damage in the middle of other files is detected only
        by `open`.
        """
        if isinstance(self.source, bytes):
            first, last, length = self.source[:_HEADER], self.source[-12:], len(self.source)
        else:
            with open_regular(self.source) as file:
                first, length = file.read(_HEADER), file.seek(0, os.SEEK_END)
                file.seek(-min(length, 12), os.SEEK_END)
                last = file.read()
        if must_be_decoded(first) or not has_valid_end(first, last, length):
            try:
                self.open()
            except InfraError as fault:
                raise ValueError(str(fault)) from fault

    def load_bytes(self) -> bytes:
        """Return the stored bytes.

        Raises:
            ValueError: the bytes do not match `sha256`, or there are more than MAX_FILE_BYTES
                bytes.
        """
        content = self.source if isinstance(self.source, bytes) else read_bytes(self.source, at_most=MAX_FILE_BYTES)
        _check_bytes(len(content))
        if self.sha256 and hashlib.sha256(content).hexdigest() != self.sha256:
            raise ValueError(f"{self.source} does not match the SHA-256 in its name")
        return content

    def _open_file(self) -> BinaryIO:
        if isinstance(self.source, bytes):
            return BytesIO(self.source)
        file = open_regular(self.source)
        _check_bytes(os.fstat(file.fileno()).st_size)
        return file

    @property
    def _name(self) -> str:
        return "" if isinstance(self.source, bytes) else f"{shorten(str(self.source))} "


def _open_image(file: BinaryIO, *, name: str = "") -> Picture:
    """Open an image without decoding it.

    Errors about unreadable images begin with `name`.
    """
    try:
        picture = Image.open(file, formats=FORMATS)
    except UNREADABLE as error:
        is_ours = isinstance(error, OSError) and error.errno is not None  # a file system error, not a damaged image
        if is_ours or isinstance(error, MemoryError | Image.DecompressionBombError):
            raise
        file.seek(0)
        raise ValueError(name + describe_bytes(file.read(HEAD_BYTES))) from error
    try:
        require_known_kind(picture)
    except UNREADABLE as error:
        picture.close()
        raise ValueError(f"{name}{error}") from error
    width, height = picture.size
    if width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT * min(width, height):
        picture.close()
        raise ValueError(f"{width}x{height} pixels: at most {MAX_PIXELS} pixels and an aspect ratio of {MAX_ASPECT} are allowed")
    return picture


def _check_bytes(size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{size} bytes, more than {MAX_FILE_BYTES}; reduce the file size")


def must_be_decoded(first: bytes) -> bool:
    """Return True if the first bytes of a file are the start of a TIFF or of a 16-bit PNG."""
    kind = picture_format(first)
    return kind == "TIFF" or (kind == "PNG" and first[_PNG_DEPTH : _PNG_DEPTH + 1] == b"\x10")


def has_valid_end(first: bytes, last: bytes, length: int) -> bool:
    """Return True if the end of a file is valid for its format.

    `first` and `last` are the first bytes and the last 12 bytes of the file; `length` is its size
    in bytes.
    """
    if first.startswith(b"RIFF"):
        return int.from_bytes(first[4:8], "little") + 8 <= length
    if first.startswith(b"BM"):
        return int.from_bytes(first[2:6], "little") <= length
    return all(last.endswith(end) for magic, end in _END_MARKERS.items() if first.startswith(magic))


def make_stored_image(value: object, *, folder: Path, where: str, roots: Sequence[Path] = ()) -> StoredImage:
    """Return the image given by a value in a row.

    Accepted values are {"bytes": ...}, {"path": ...}, bytes, base64, a path, the SHA-256 of a file
    in `folder`, and URLs with the scheme data or file. In JSON files, bytes are base64-encoded.
    Text that names an existing file is a path, even if it could also be base64. Rows may come from
    an untrusted source, so a file must lie below `folder` or one of `roots` after symbolic links
    are resolved.

    Raises:
        ValueError: the value has none of these forms, the file does not exist, or the file lies
            outside the allowed folders.
    """
    if isinstance(value, Mapping):
        if not value.keys() & {"bytes", "path"}:
            raise ValueError(f'{where}: must have "bytes" or "path", but has {shorten(", ".join(map(str, value))) or "nothing"}')
        value = value["path"] if value.get("bytes") is None and "path" in value else _decode_bytes(value["bytes"], where)
    if isinstance(value, bytes):
        return StoredImage(value, where)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: must be a path, bytes or a SHA-256, but is {_type_name(value)}")
    if re.match(r"\s*data:", value, re.IGNORECASE):
        return StoredImage(_decode_bytes(value, where), where)
    if re.fullmatch("[0-9a-f]{64}", value):
        return StoredImage(check_inside_roots(_find_by_hash(value, folder, where), folder, roots, where), where, sha256=value)
    path = folder / _path_of_url(value, where)
    if os.path.isfile(path):  # Path.is_file raises an error if a name is too long
        return StoredImage(check_inside_roots(path, folder, roots, where), where)
    try:
        if content := decode_base64_image(value):
            return StoredImage(content, where)
    except ValueError as error:
        raise ValueError(f"{where}: {shorten(value)} {error}") from error
    raise ValueError(f"{where}: no such file {folder / shorten(value)}; {_remedy_of(value, folder)}")


def _path_of_url(value: str, where: str) -> str:
    """Return the path in a file URL, or the text itself if it is not a URL.

    Raises:
        ValueError: the URL has another scheme or names another host.
    """
    if re.match("file:/", value, re.IGNORECASE):
        rest = value[len("file:") :]
        host, _, path = rest[2:].partition("/") if rest.startswith("//") else ("", "/", rest[1:])
        if host.lower() not in ("", "localhost"):
            raise ValueError(f"{where}: {shorten(value)} names a file on the machine {host}; give its path on this machine: file:///...")
        return "/" + unquote(path)
    if re.match("[a-z][a-z0-9+.-]*://", value, re.IGNORECASE):
        raise ValueError(f"{where}: {shorten(value)} is a URL, which is not supported; download the image and give its path")
    return value


def _remedy_of(value: str, folder: Path) -> str:
    """Suggest a fix for a path that does not exist, such as a similar path that exists."""
    spellings = {
        unquote(value): "percent signs are not decoded",
        value.replace("\\", "/"): "folders are separated by /",
        value.strip(): "blanks around it are part of the name",
        os.path.expanduser(value) if value.startswith("~") else value: "~ is not expanded",
    }
    for spelling, why in spellings.items():
        if spelling != value and spelling and os.path.isfile(folder / spelling):
            return f"{why}: write {shorten(spelling)}"
    if re.match(r"image/[a-z0-9.+-]+;base64,", value, re.IGNORECASE):
        return "a data: URL begins with data:"
    return "task.data.images is the folder that relative paths start from"


def check_inside_roots(path: Path, folder: Path, roots: Sequence[Path], where: str) -> Path:
    """Return `path` unchanged if it lies below `folder` or one of `roots`.

    Symbolic links are resolved before the check.

    Raises:
        ValueError: the path lies elsewhere.
    """
    real = os.path.realpath(path)
    if not any(real.startswith(os.path.join(os.path.realpath(home), "")) for home in (folder, *roots)):
        remedy = f"task.data.image_roots=[{os.path.dirname(real)}] allows images from that folder"
        raise ValueError(f"{where}: {shorten(str(path))} is outside of {folder} (resolved to {shorten(real)}); {remedy}")
    return path


def shorten(text: str) -> str:
    """Shorten a text for messages to one line of at most 80 characters, cutting the middle."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= 80 else f"{text[:38]}...{text[-39:]}"


def _decode_bytes(value: object, where: str) -> bytes:
    """Decode a data URL or the value of a key "bytes" in a row."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{where}: the key bytes must contain raw bytes, or base64 in JSON, but is {_type_name(value)}")
    is_url = re.match(r"\s*data:", value, re.IGNORECASE) is not None
    try:
        return decode_data_url(value) if is_url else decode_base64(value)
    except ValueError as error:
        if value.startswith(("b'", 'b"')):
            raise ValueError(f"{where}: bytes {describe_bytes(value[:2].encode())}") from error
        must = "" if is_url else "the key bytes must contain raw bytes, or base64 in JSON; "
        raise ValueError(f"{where}: {must}{shorten(value)} {error}") from error


def _type_name(value: object) -> str:
    return "empty" if value == "" else type(value).__name__


def _find_by_hash(digest: str, folder: Path, where: str) -> Path:
    for path in (folder / part / f"{digest}{suffix}" for part in ("", digest[:2]) for suffix in SUFFIXES):
        if path.is_file():
            return path
    raise ValueError(
        f"{where}: {folder} contains no file with the SHA-256 {digest} as its name; task.data.images must be the folder of the images"
    )
