"""Validates the inputs passed to `open` and converts them to named files."""

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import PurePosixPath

from PIL import Image

from megatron_rl_sandbox.records import BoxLimits

IMAGE_MAGIC = {
    b"\x89PNG": ".png",
    b"\xff\xd8\xff": ".jpg",
    b"GIF8": ".gif",
    b"RIFF": ".webp",
    b"BM": ".bmp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
}
"""File name suffixes of image formats, keyed by the first bytes of their files.

The pool checks only these bytes of an encoded image. The image is decoded inside the box.
"""
MAX_INPUTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxInput:
    """Input file of a box. An image file can also be bound to a variable."""

    name: str
    """Path relative to the working directory."""
    content: bytes = field(repr=False)
    is_image: bool = False
    variable: str | None = None


def collect_inputs(*, images: Mapping[str, Image.Image | bytes], files: Mapping[str, bytes], limits: BoxLimits) -> list[BoxInput]:
    """Convert images and files to a list of inputs.

    Raises:
        ValueError: An input is invalid. The message names the input.
    """
    found = [_make_image_input(name, picture) for name, picture in images.items()]
    found += [BoxInput(name=name, content=bytes(content)) for name, content in files.items()]
    names: set[str] = set()
    for item in found:
        if not _is_safe_path(item.name):
            raise ValueError(f"{item.name!r} is not a valid file name in the working directory: use a relative path without '..'")
        if item.name in names:
            raise ValueError(f"two inputs are named {item.name!r}: rename one")
        names.add(item.name)
    for name in names:
        above = {str(folder) for folder in PurePosixPath(name).parents}
        if above & names:
            raise ValueError(f"{name!r} is below another input, which is a file and not a folder: rename one of them")
    size = sum(len(item.content) for item in found)
    if size > limits.input_bytes or len(found) > MAX_INPUTS:
        raise ValueError(
            f"{len(found)} inputs with {size} bytes in total: "
            f"limits are {MAX_INPUTS} inputs and {limits.input_bytes} bytes (BoxLimits.input_bytes)"
        )
    return found


def _make_image_input(name: str, picture: Image.Image | bytes) -> BoxInput:
    if isinstance(picture, Image.Image):
        buffer = BytesIO()
        try:
            picture.save(buffer, format="PNG", compress_level=1)
        except (OSError, ValueError) as error:
            raise ValueError(f"images.{name}: cannot be written as PNG: {error}") from error
        content, suffix = buffer.getvalue(), ".png"
    else:
        content = bytes(picture)
        suffix = next((suffix for magic, suffix in IMAGE_MAGIC.items() if content.startswith(magic)), "")
        if not suffix:
            raise ValueError(f"images.{name}: {len(content)} bytes without the signature of a PNG, JPEG, WEBP, GIF, BMP or TIFF file")
    path = PurePosixPath(name)
    stem = path.stem if _is_variable_name(path.stem) else None
    if path.suffix:
        return BoxInput(name=name, content=content, is_image=True, variable=stem)
    if stem is None or name != stem:
        raise ValueError(f"images.{name}: neither a variable name nor a file name: use a name like image_0 or photo.jpg")
    return BoxInput(name=name + suffix, content=content, is_image=True, variable=stem)


def _is_variable_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")


def _is_safe_path(name: str) -> bool:
    parts = name.split("/")
    return (
        "\0" not in name
        and len(parts) <= 8
        and all(part not in ("", ".", "..") and len(part.encode("utf-8", "replace")) <= 200 for part in parts)
    )
