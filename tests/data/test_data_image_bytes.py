"""Tests the values that a row may contain for an image: base64 of all kinds, data: and file: URLs,
and paths. Bytes that are no image are refused with their kind.
"""

import base64
import gzip
import json
from io import BytesIO
from pathlib import Path
from urllib.parse import quote

import pytest
from PIL import Image

from megatron_rl.data.images import StoredImage, make_stored_image
from megatron_rl.errors import PermanentInfraError
from tests.support.data_files import make_png

PNG = make_png(size=(40, 30), color="red")
NOISE = b"".join(bytes([x * x % 251, x % 256]) for x in range(3000))
READ = "PNG, JPEG, WEBP, GIF, BMP and TIFF are supported"


def saved(form: str) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (16, 16), "red").save(buffer, form)
    return buffer.getvalue()


OTHERS = {
    "svg": (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "is an SVG"),
    "plain svg": (b"<svg/>", "is an SVG"),
    "avif": (saved("AVIF"), "is an AVIF"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "is a HEIC"),
    "ico": (saved("ICO"), "is an ICO"),
    "ppm": (saved("PPM"), "is a PPM"),
    "jpeg 2000": (saved("JPEG2000"), "is a JPEG 2000"),
    "jpeg xl": (b"\xff\x0a" + NOISE, "is a JPEG XL"),
    "pdf": (saved("PDF"), "is a PDF"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "is PostScript"),
    "psd": (b"8BPS\0\1" + bytes(20), "is a Photoshop file"),
    "dds": (saved("DDS"), "is a DDS"),
    "dicom": (bytes(128) + b"DICM\2\0", "is a DICOM"),
}
NO_PICTURES = {
    "web page": (b"<!DOCTYPE html>\n<html><body>404</body></html>", r"is a web page \(HTML\)"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 4\n", "is a Git LFS pointer to a file .* run git lfs pull"),
    "gzip": (gzip.compress(PNG), "is compressed by gzip: unpack it"),
    "zip": (b"PK\x03\x04" + NOISE, "is a ZIP archive"),
    "empty": (b"", "is empty"),
    "zeros": (bytes(4000), "begins with only zero bytes: it was"),
    "json": (b'{"error": "no such key"}', "is JSON, not an image$"),
    "text": ("Größe: 3\n".encode() * 200, "is text, not an image$"),
    "video": (b"\0\0\0\x18ftypisom\0\0\0\0", r"is a video \(MP4\)"),
    "avi": (b"RIFF\0\0\0\0AVI LIST", r"is a video \(AVI\)"),
    "pickle": (b"\x80\x04\x95a\0\0\0", "is a Python pickle"),
    "webp, cut off": (b"RIFF\x20\0\0\0WEBPVP8 ", "begins like a WEBP, but its header is damaged"),
    "numpy": (b"\x93NUMPY\1\0", "is a NumPy array"),
    "noise": (NOISE, f"is not a known image format: it begins with the bytes 00 00 01 01 04 02 09 03; {READ}"),
    "half a header": (PNG[:20], "begins like a PNG, but its header is damaged"),
}


@pytest.mark.parametrize("kind", [*OTHERS, *NO_PICTURES])
@pytest.mark.parametrize("is_file", [True, False])
def test_bytes_that_are_no_picture_are_named(kind: str, is_file: bool, tmp_path: Path) -> None:
    """The kind is named at the start of a run and in an episode. A file is named, and the message
    for an unsupported image format lists the supported ones.
    """
    content, said = OTHERS.get(kind) or NO_PICTURES[kind]
    said += f".*; {READ}" if kind in OTHERS else ""
    (tmp_path / "odd.png").write_bytes(content)
    image = StoredImage(tmp_path / "odd.png" if is_file else content, "rows.jsonl row 3: images[0]")
    named = r"\S*odd.png " if is_file else ""
    with pytest.raises(ValueError, match=rf"^rows.jsonl row 3: images\[0\]: {named}{said}") as error:
        image.size()
    assert "object at" not in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(PermanentInfraError, match=said.removesuffix("$")):
        image.open()
    assert "Größe" not in str(error.value)  # the message of a service must not reveal a file's content to a client that names the file


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    Image.new("F", (8, 8)).save(tmp_path / "float.tif")
    with pytest.raises(ValueError, match=r"^here: \S*float.tif has samples that are floating-point numbers; save it as 8-bit RGB or gray"):
        StoredImage(tmp_path / "float.tif", "here").size()


def url_safe(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode()


TEXT = base64.b64encode(PNG).decode()
VARIANTS = {
    "plain": TEXT,
    "lines of 76": base64.encodebytes(PNG).decode(),
    "lines of Windows": base64.encodebytes(PNG).decode().replace("\n", "\r\n"),
    "no padding": TEXT.rstrip("="),
    "url-safe": url_safe(PNG),
    "url-safe without padding": url_safe(PNG).rstrip("="),
    "blanks around": f"  {TEXT}\n",
    "data": f"data:image/png;base64,{TEXT}",
    "DATA": f"DATA:image/png;BASE64,{TEXT}",
    "data of two parameters": f"data:image/png;charset=utf-8;base64,{TEXT}",
    "data without a type": f"data:;base64,{TEXT}",
    "data of another type": f"data:application/octet-stream;base64,{TEXT}",
    "data with lines": f"data:image/png;base64,\n{base64.encodebytes(PNG).decode()}",
    "data, url-safe": f"data:image/png;base64,{url_safe(PNG).rstrip('=')}",
    "data, percent-encoded base64": f"data:image/png;base64,{quote(TEXT, safe='')}",
    "data, percent-encoded": f"data:image/png,{quote(PNG)}",
    "blanks before data": f" data:image/png;base64,{TEXT} ",
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_mapping", [False, True], ids=["text", "bytes"])
def test_base64_of_every_kind_is_read(variant: str, is_mapping: bool, tmp_path: Path) -> None:
    """The bytes of the image contain values whose base64 differs between the two alphabets."""
    assert "-" in url_safe(PNG) + url_safe(NOISE) and len(PNG) % 3
    value = {"bytes": VARIANTS[variant]} if is_mapping else VARIANTS[variant]
    assert make_stored_image(value, folder=tmp_path, where="here").source == PNG


@pytest.mark.parametrize("length", range(3000, 3004))
def test_every_byte_survives_both_alphabets(length: int, tmp_path: Path) -> None:
    content = PNG[:4] + NOISE * 2
    for text in (base64.b64encode(content[:length]).decode(), url_safe(content[:length]).rstrip("=")):
        assert make_stored_image(text, folder=tmp_path, where="here").source == content[:length]


SVG = OTHERS["svg"][0] * 2
BROKEN = "begins with the base64 of an image, but contains invalid base64; encode it again"
REFUSED = {
    "base64 of an SVG": (base64.b64encode(SVG).decode(), f"is base64, but the decoded data is an SVG; {READ}"),
    "base64 of a web page": (base64.b64encode(b"<!DOCTYPE html><html>" + b" " * 60).decode(), "is base64, but the decoded data is a web"),
    "base64 of noise": (base64.b64encode(NOISE).decode(), "is base64, but the decoded data is not a known image format"),
    "base64 with a hole": (f"{TEXT[:40]}*{TEXT[40:]}", BROKEN),
    "base64 that is cut off": (TEXT.rstrip("=")[: len(TEXT) // 4 * 4 - 3], BROKEN),
    "hexadecimal": (PNG.hex()[:80], "no such file"),
    "data without a comma": ("data:image/png;base64", "is a data: URL without a comma"),
    "data with a hole": (f"data:image/png;base64,{TEXT[:40]}*{TEXT[40:]}", r"is not base64: it contains '\*'"),
    "bytes as Python prints them": ({"bytes": str(PNG)}, r"bytes is the text that Python prints for bytes \(b'...'\): write base64"),
    "bytes as a list": ({"bytes": list(PNG)}, "the key bytes must contain raw bytes, or base64 in JSON, but is list"),
    "bytes in Latin-1": ({"bytes": PNG.decode("latin-1")}, "is not base64: it contains"),
    "a web address in capitals": ("HTTPS://host/a.png", "is a URL, which is not supported; download"),
    "a bucket": ("s3://bucket/a.png", "is a URL, which is not supported; download"),
    "another machine's file": ("file://server/share/a.png", "names a file on the machine server"),
    "nothing": ("", "must be a path, bytes or a SHA-256, but is empty"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_picture_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    value, said = REFUSED[kind]
    with pytest.raises(ValueError, match=f"^rows.jsonl row 3: images: .*{said}") as error:
        make_stored_image(value, folder=tmp_path, where="rows.jsonl row 3: images")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/svg+xml;utf8,%3Csvg/%3E", "is an SVG"),
        (f"data:image/svg+xml;base64,{base64.b64encode(SVG).decode()}", "is an SVG"),
        ("data:text/html,<html>", "is a web page"),
        ("data:,", "is empty"),
    ],
)
def test_a_data_url_of_another_kind_is_named_at_the_start(url: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^here: {said}"):
        make_stored_image(url, folder=tmp_path, where="here").size()


@pytest.mark.parametrize("form", ["file://{}", "file://localhost{}", "FILE://{}", "file:{}"])
def test_a_file_url_is_a_path(form: str, tmp_path: Path) -> None:
    """Percent signs in a file: URL are decoded, and the file must lie in a permitted folder, like
    any path.
    """
    (tmp_path / "data").mkdir()
    for path in (tmp_path / "data" / "a b%.png", tmp_path / "outside.png"):
        path.write_bytes(PNG)
    inside = form.format(quote(str(tmp_path / "data" / "a b%.png")))
    assert make_stored_image(inside, folder=tmp_path / "data", where="here").open().size == (40, 30)
    with pytest.raises(ValueError, match="is outside of"):
        make_stored_image(form.format(tmp_path / "outside.png"), folder=tmp_path / "data", where="here")
    with pytest.raises(ValueError, match="no such file"):
        make_stored_image(form.format(tmp_path / "none.png"), folder=tmp_path, where="here")


def test_a_misspelled_path_is_answered_with_the_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "c.png").write_bytes(PNG)
    for written, why in {
        "a%20b/c.png": "percent signs are not decoded: write a b/c.png",
        "a b\\c.png": "folders are separated by /: write a b/c.png",
        " a b/c.png\n": "blanks around it are part of the name: write a b/c.png",
        "~/a b/c.png": f"~ is not expanded: write {tmp_path}/a b/c.png",
        "a b/d.png": "task.data.images is the folder that relative paths start from",
    }.items():
        with pytest.raises(ValueError, match="no such file") as error:
            make_stored_image(written, folder=tmp_path, where="here")
        assert str(error.value).replace("...", "")[-20:] == why[-20:]


def test_bytes_that_are_null_leave_the_path(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    assert make_stored_image(json.loads('{"bytes": null, "path": "a.png"}'), folder=tmp_path, where="here").source == tmp_path / "a.png"
