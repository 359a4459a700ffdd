"""Decodes images given as base64 or data URLs, and describes files that are not images."""

import base64
import codecs
import re
from urllib.parse import unquote_to_bytes

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAGIC = {
    b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF8": "GIF", b"BM": "BMP",
    b"II*\0": "TIFF", b"MM\0*": "TIFF", b"II+\0": "TIFF", b"MM\0+": "TIFF",
}  # fmt: skip
"""Maps magic numbers to image formats.

WEBP is not included, because a WEBP file begins with RIFF and the file length, followed by WEBP.
"""
HEAD_BYTES = 512
"""Number of leading bytes of a file that `describe_bytes` needs."""
READABLE_FORMATS_TEXT = f"{', '.join(FORMATS[:-1])} and {FORMATS[-1]} are supported"
_CONVERT = f"{READABLE_FORMATS_TEXT}: convert it"
_OTHERS = {
    b"version https://git-lfs": "is a Git LFS pointer to a file that was not downloaded: run git lfs pull",
    b"\x1f\x8b": "is compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd: unpack it",
    b"BZh": "is compressed by bzip2: unpack it",
    b"\xfd7zXZ": "is compressed by xz: unpack it",
    b"PK\x03\x04": "is a ZIP archive: unpack it",
    b"7z\xbc\xaf": "is a 7z archive: unpack it",
    b"%PDF-": f"is a PDF; {READABLE_FORMATS_TEXT}: save its page as an image",
    b"%!PS": f"is PostScript; {_CONVERT}",
    b"\0\0\1\0": f"is an ICO; {_CONVERT}",
    b"\0\0\2\0": f"is a CUR; {_CONVERT}",
    b"\0\0\0\x0cjP  ": f"is a JPEG 2000; {_CONVERT}",
    b"\xff\x4f\xff\x51": f"is a JPEG 2000; {_CONVERT}",
    b"\0\0\0\x0cJXL ": f"is a JPEG XL; {_CONVERT}",
    b"\xff\x0a": f"is a JPEG XL; {_CONVERT}",
    b"8BPS": f"is a Photoshop file; {_CONVERT}",
    b"DDS ": f"is a DDS; {_CONVERT}",
    b"qoif": f"is a QOI; {_CONVERT}",
    b"icns": f"is an ICNS; {_CONVERT}",
    b"#?RADIANCE": f"is a Radiance HDR; {_CONVERT}",
    b"\x76\x2f\x31\x01": f"is an OpenEXR; {_CONVERT}",
    b"\xd7\xcd\xc6\x9a": f"is a WMF; {_CONVERT}",
    b"SIMPLE  =": f"is a FITS; {_CONVERT}",
    b"\x93NUMPY": f"is a NumPy array; {READABLE_FORMATS_TEXT}: save it as an image",
    b"\x1aE\xdf\xa3": "is a video (Matroska or WebM)",
    b"\x89HDF": f"is HDF5; {READABLE_FORMATS_TEXT}: save its images as files",
    b"\x80\x03": f"is a Python pickle; {READABLE_FORMATS_TEXT}: save it as an image",
    b"\x80\x04": f"is a Python pickle; {READABLE_FORMATS_TEXT}: save it as an image",
    b"\x80\x05": f"is a Python pickle; {READABLE_FORMATS_TEXT}: save it as an image",
    b"PAR1": "is a Parquet file, not an image",
    b"b'": "is the text that Python prints for bytes (b'...'): write base64 instead",
    b'b"': 'is the text that Python prints for bytes (b"..."): write base64 instead',
}
_BRANDS = {b"avif": "an AVIF", b"avis": "an AVIF", b"qt  ": "a video (QuickTime)"}
"""Maps a brand in the ftyp box (ISO/IEC 14496-12) to a description of the format."""
_HEIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_SPACE = re.compile(r"\s+")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]*={0,2}")
_MIN_BASE64, _LONGEST_PATH = 64, 1024
"""Text lengths above which base64 text is an error if it does not decode to an image.

_MIN_BASE64 applies if the decoded bytes have a known format. _LONGEST_PATH applies to any content,
because paths are never longer.
"""
_UNKNOWN = "is not a known image format"


def picture_format(head: bytes) -> str:
    """Return the image format indicated by the first bytes of a file (one of FORMATS), or ""."""
    if head.startswith(b"RIFF"):
        return "WEBP" if head[8:12] == b"WEBP" else ""
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), "")


def describe_bytes(head: bytes) -> str:
    """Return a phrase that describes a file, based on the first bytes of the file.

    Two examples of the phrase: `is empty`; `is an SVG; PNG, ... are supported: convert it`.
    """
    if not head:
        return "is empty"
    if not head.strip(b"\0"):
        return "begins with only zero bytes: it was not written completely, or is a placeholder"
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            return what
    if head[4:8] == b"ftyp":
        what = "a HEIC" if head[8:12] in _HEIF else _BRANDS.get(head[8:12], "a video (MP4)")
        return f"is {what}; {_CONVERT}" if "video" not in what else f"is {what}, not an image"
    if head[128:132] == b"DICM":
        return f"is a DICOM; {_CONVERT}"
    if head.startswith(b"RIFF") and head[8:12] != b"WEBP":
        return f"is {'a video (AVI)' if head[8:11] == b'AVI' else 'a RIFF file'}, not an image"
    if re.match(rb"P[1-7]\s", head):
        return f"is a PPM, PGM, PBM or PAM; {_CONVERT}"
    if name := picture_format(head):
        return f"begins like a {name}, but its header is damaged or not supported; save it again as PNG"
    return _describe_text(head)


def _describe_text(head: bytes) -> str:
    lowered = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if b"<svg" in lowered:
        return f"is an SVG; {_CONVERT}"
    if lowered.startswith((b"<!doctype html", b"<html")):
        return "is a web page (HTML), probably from a failed download: download the image again"
    if lowered.startswith(b"<?xml"):
        return "is XML, not an image"
    if lowered.startswith((b"{", b"[")):
        return "is JSON, not an image"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the head may end within a character
        is_text = all(character.isprintable() or character.isspace() for character in text)
    except UnicodeDecodeError:
        is_text = False
    if is_text:
        return "is text, not an image"
    return f"{_UNKNOWN}: it begins with the bytes {head[:8].hex(' ')}; {READABLE_FORMATS_TEXT}"


def decode_base64(text: str) -> bytes:
    """Decode base64 in the standard or the URL-safe alphabet.

    Padding is optional and white space is ignored.

    Raises:
        ValueError: the text is not base64.
    """
    plain = _SPACE.sub("", text)
    if not _BASE64.fullmatch(plain):
        odd = next(character for character in plain.rstrip("=") + "=" if not re.match("[A-Za-z0-9+/_-]", character))
        raise ValueError(f"is not base64: it contains {odd!r}")
    letters = plain.rstrip("=").replace("-", "+").replace("_", "/")
    if len(letters) % 4 == 1:
        raise ValueError(f"is not base64: {len(letters)} characters do not encode a whole number of bytes; the text is truncated")
    return base64.b64decode(letters + "=" * (-len(letters) % 4))


def decode_data_url(url: str) -> bytes:
    """Decode a `data:` URL (RFC 2397), which is base64-encoded or percent-encoded, to bytes.

    Raises:
        ValueError: the text is not a valid data: URL.
    """
    head, comma, data = url.strip().partition(",")
    if not comma:
        raise ValueError("is a data: URL without a comma; write data:image/png;base64,...")
    content = unquote_to_bytes(data)
    return decode_base64(content.decode("latin-1")) if head.lower().rstrip().endswith(";base64") else content


def decode_base64_image(text: str) -> bytes:
    """Return the image encoded in a base64 text.

    Return b"" if the text may be something other than base64, such as a path.

    Raises:
        ValueError: the text is certainly base64, but does not decode to an image.
    """
    try:
        content = decode_base64(text)
    except ValueError:
        return _require_no_broken_base64(text)
    if picture_format(content):
        return content
    what = describe_bytes(content[:HEAD_BYTES])
    if len(text) > _LONGEST_PATH or (len(text) >= _MIN_BASE64 and not what.startswith(_UNKNOWN)):
        raise ValueError(f"is base64, but the decoded data {what}")
    return b""


def _require_no_broken_base64(text: str) -> bytes:
    """Raise ValueError if the text is a damaged base64 image, else return b"".

    Raises:
        ValueError: the text starts with a base64 image but is not valid base64 to the end.
    """
    start = re.match(r"[A-Za-z0-9+/_-]{16}", text.strip())
    if start and picture_format(decode_base64(start[0])):
        raise ValueError("begins with the base64 of an image, but contains invalid base64; encode it again")
    return b""
