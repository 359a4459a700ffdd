"""Parser for the replies of a box.

Code in the box may have forged any part of a reply, so the type and size of every field are checked
and every PNG is validated.
"""

import asyncio
import os
from dataclasses import dataclass

from megatron_rl_sandbox import image_codec
from megatron_rl_sandbox.frames import Frame, MalformedFrame
from megatron_rl_sandbox.records import BoxLimits, CallError, DroppedOutput, ReturnedImage

MAX_NAME = 4096
MAX_MESSAGE = 2000
MAX_TRACEBACK = 8192
LIGHT_BYTES = LIGHT_PIXELS = 1 << 18
"""Maximum number of PNG bytes, and of pixels, in a reply that is checked on the event loop.

The check takes at most 2 ms. Larger replies are checked in a thread.
"""
REPORTABLE_LIMITS = {"memory", "disk", "processes"}
"""Limits that the box itself may report. All other limits are detected outside the box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReply:
    """Validated reply of a box to a call."""

    error: CallError | None
    limit: str | None
    pictures: tuple[ReturnedImage, ...]
    dropped: tuple[DroppedOutput, ...]
    files: dict[str, int]
    cpu_s: float
    memory: int


async def parse_reply_off_loop(frame: Frame, *, number: int, limits: BoxLimits, budget: image_codec.ImageBudget) -> CallReply:
    """Parse a reply to call `number`, in a thread if the reply is large.

    Raises MalformedFrame if the reply is invalid.
    """
    if _is_light(frame):
        return parse_reply(frame, number=number, limits=limits, budget=budget)
    return await asyncio.to_thread(parse_reply, frame, number=number, limits=limits, budget=budget)


def parse_reply(frame: Frame, *, number: int, limits: BoxLimits, budget: image_codec.ImageBudget) -> CallReply:
    """Parse a reply to call `number` and validate its images.

    Raises MalformedFrame if the reply is invalid.
    """
    message, blobs = frame
    if len(blobs) > limits.images:
        raise MalformedFrame(f"{len(blobs)} images, {limits.images} allowed")
    if _integer(message, "id") != number:
        raise MalformedFrame(f"a reply to call {message['id']}, not {number}")
    sources = _list(message, "sources", most=len(blobs))
    if len(sources) != len(blobs):
        raise MalformedFrame(f"{len(sources)} sources of {len(blobs)} images")
    dropped = [_dropped(item) for item in _list(message, "dropped", most=100)]
    pictures: list[ReturnedImage] = []
    budget.begin_call()
    for source, png in zip(sources, blobs, strict=True):
        picture = _picture(_text(source, most=MAX_NAME), png, limits=limits, budget=budget)
        (pictures if isinstance(picture, ReturnedImage) else dropped).append(picture)
    files = message.get("files")
    if not isinstance(files, dict) or len(files) > limits.files or not all(type(size) is int and size >= 0 for size in files.values()):
        raise MalformedFrame("files")
    limit = message.get("limit")
    return CallReply(
        error=None if message.get("error") is None else _error(message["error"]),
        limit=limit if isinstance(limit, str) and limit in REPORTABLE_LIMITS else None,
        pictures=tuple(pictures),
        dropped=tuple(dropped),
        files={_text(name, most=MAX_NAME): size for name, size in files.items()},
        cpu_s=_seconds(message),
        memory=_integer(message, "memory"),
    )


def parse_fetched_files(frame: Frame, *, number: int, asked: set[str], limits: BoxLimits) -> dict[str, bytes]:
    """Parse the reply to request `number`, which asked for the files in `asked`.

    Raises MalformedFrame if the reply is invalid.
    """
    message, blobs = frame
    names = [_text(name, most=MAX_NAME) for name in _list(message, "names", most=len(blobs))]
    if _integer(message, "id") != number or len(names) != len(blobs) or not asked.issuperset(names):
        raise MalformedFrame("not the requested files")
    if any(len(content) > limits.file for content in blobs):
        raise MalformedFrame("a file exceeds its size limit")
    return dict(zip(names, blobs, strict=True))


def read_stream(descriptor: int, *, what: str, limits: BoxLimits) -> tuple[str, DroppedOutput | None]:
    """Return (text, dropped): the text of an output stream, and a record of the omitted part.

    If the stream is longer than `limits.text` characters, the middle of the stream is omitted.
    Otherwise, `dropped` is None.
    """
    size = os.fstat(descriptor).st_size
    most = 4 * limits.text  # at most 4 bytes per character in UTF-8
    if size <= 2 * most:
        text = os.pread(descriptor, size, 0).decode("utf-8", "replace")
        if len(text) <= limits.text:
            return text, None
        first, last, missing = text[: limits.text // 2], text[-(limits.text // 2) :], f"{len(text) - limits.text // 2 * 2} characters"
    else:
        first = os.pread(descriptor, most, 0).decode("utf-8", "replace")[: limits.text // 2]
        last = os.pread(descriptor, most, size - most).decode("utf-8", "replace")[-(limits.text // 2) :]
        missing = f"about {size - limits.text} bytes"
    return f"{first}\n[... {missing} left out ...]\n{last}", DroppedOutput(
        what=what, reason=f"{missing} in the middle; {limits.text} are kept"
    )


def _is_light(frame: Frame) -> bool:
    _, blobs = frame
    if sum(map(len, blobs)) > LIGHT_BYTES:
        return False
    pixels = 0
    for png in blobs:
        try:
            width, height = image_codec.read_png_size(png)
        except ValueError:  # an image with an invalid header is never decompressed
            continue
        pixels += width * height
    return pixels <= LIGHT_PIXELS


def _picture(source: str, png: bytes, *, limits: BoxLimits, budget: image_codec.ImageBudget) -> ReturnedImage | DroppedOutput:
    try:
        width, height = image_codec.read_png_size(png)
        reason = image_codec.check_image_size(width=width, height=height, limits=limits)
        reason = reason or budget.check_image(pixels=width * height, num_bytes=len(png))
        if reason or len(png) > limits.image_bytes:
            return DroppedOutput(what="image", reason=f"{source}: {reason or f'{len(png)} bytes as PNG, {limits.image_bytes} allowed'}")
        # Count the image before decompressing it, so that an invalid image uses as much of the
        # budget as a valid image.
        budget.count_image(pixels=width * height, num_bytes=len(png))
        image_codec.check_png(png)
    except ValueError as error:
        return DroppedOutput(what="image", reason=f"{source}: {error}")
    return ReturnedImage(png=png, width=width, height=height, source=source)


def _error(value: object) -> CallError:
    if not isinstance(value, dict):
        raise MalformedFrame("error")
    line = value.get("line")
    return CallError(
        type=_text(value.get("type"), most=100),
        message=_text(value.get("message"), most=MAX_MESSAGE),
        line=line if type(line) is int and 0 < line < 1 << 31 else None,
        traceback=_text(value.get("traceback"), most=MAX_TRACEBACK),
    )


def _dropped(value: object) -> DroppedOutput:
    if not isinstance(value, list) or len(value) != 2 or value[0] not in ("image", "files"):
        raise MalformedFrame("dropped")
    return DroppedOutput(what=value[0], reason=_text(value[1], most=MAX_NAME + MAX_MESSAGE))


def _text(value: object, *, most: int) -> str:
    """Return `value` with lone surrogates replaced by question marks, so that it can be encoded."""
    if not isinstance(value, str) or len(value) > most:
        raise MalformedFrame(f"a string of at most {most} characters was due")
    return value.encode("utf-8", "replace").decode()


def _list(message: dict[str, object], key: str, *, most: int) -> list[object]:
    value = message.get(key)
    if not isinstance(value, list) or len(value) > most:
        raise MalformedFrame(key)
    return value


def _integer(message: dict[str, object], key: str) -> int:
    value = message.get(key)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise MalformedFrame(key)
    return value


def _seconds(message: dict[str, object]) -> float:
    value = message.get("cpu_s")
    if type(value) is not float or not 0 <= value < 1e9:
        raise MalformedFrame("cpu_s")
    return value
