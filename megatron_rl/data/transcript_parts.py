"""Converts the contents of transcript messages to ordered lists of texts and images.

Each `<image>` in a text, and each part {"type": "image"} without its own image, is a placeholder
for the next image in the row's image column. If there are no placeholders, all images are placed at
the start of the first message that is not a system message, as for questions. Placeholders for
other media raise an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.data.images import StoredImage, shorten
from megatron_rl.data.media_places import PARTS_AS_TEXT, find_media_placeholder, find_object_placeholder
from megatron_rl.data.records import IMAGE_PLACEHOLDER, DataRecord
from megatron_rl.data.transcript_messages import RawMessage, is_empty

ContentPart = dict[str, Any]
"""Content part {"type": "text", "text": str} or {"type": "image", "image": StoredImage}.

An image part without the key "image" is a placeholder that has not been filled yet.
"""
IMAGE_ROLES = ("user", "tool")
"""Roles of messages that may contain images."""
IMAGE_KEYS = ("image", "path", "url", "base64")
"""Keys of an image part that may contain its image.

Qwen uses the key image, and transformers uses the others.
"""
_PUT = "move its text into a part of type text"
_LEAVE = "is not read: transcripts contain only text and images; remove the row"
PART_REMEDIES = {
    **dict.fromkeys(("video", "video_url", "audio", "audio_url", "input_audio", "file", "input_file"), _LEAVE),
    **dict.fromkeys(("input_text", "output_text"), "is not read; write type text"),
    "input_image": "is not read; write type image or image_url",
    **dict.fromkeys(("refusal", "thinking", "reasoning", "tool_use", "tool_call", "tool_result"), f"is not read; {_PUT}"),
}
"""Maps an unsupported part type to its error message."""


def read_parts(
    record: DataRecord, messages: Sequence[RawMessage], images: Sequence[StoredImage], *, column: str
) -> list[list[ContentPart]]:
    """Return the parts of each message with all placeholders filled.

    Args:
        record: the row.
        messages: messages of the row.
        images: images in the row's image column.
        column: name of the image column, or "" if the row has none.

    Raises:
        ValueError: the number of placeholders differs from the number of images, or a message
            contains anything other than texts and images.
    """
    contents = [list(_read_content(record, message)) for message in messages]
    shown = [part for parts in contents for part in parts if part["type"] == "image"]
    if images and not shown:
        first = next((number for number, message in enumerate(messages) if message.role in IMAGE_ROLES), 0)
        contents[first] = list(_prepend_placeholders(contents[first], len(images)))
    remaining = iter(images)
    filled = [
        [_fill_placeholder(record, part, remaining, column=column, field=message.location) for part in parts]
        for message, parts in zip(messages, contents, strict=True)
    ]
    if next(remaining, None) is not None:
        num = sum("image" not in part for part in shown)
        raise record.make_error(
            column,
            f"{len(images)} images for {num} placeholders; write {IMAGE_PLACEHOLDER} for every image, or for none (images then come first)",
        )
    return filled


def _prepend_placeholders(parts: Sequence[ContentPart], num: int) -> Iterator[ContentPart]:
    """Yield `num` image placeholders, each followed by a line break, and then the given parts."""
    for _ in range(num - 1):
        yield from ({"type": "image"}, {"type": "text", "text": "\n"})
    yield {"type": "image"}
    first, *others = [*parts, {"type": "text", "text": ""}]
    yield {"type": "text", "text": "\n" + str(first["text"])}
    yield from others[:-1]


def _fill_placeholder(record: DataRecord, part: ContentPart, images: Iterator[StoredImage], *, column: str, field: str) -> ContentPart:
    if part["type"] == "text" or "image" in part:
        return part
    image = next(images, None)
    if image is None:
        lacks = f"the column {column} has no images left" if column else "the row has no image column (images, image, ..)"
        raise record.make_error(field, f"has an image placeholder ({IMAGE_PLACEHOLDER}, or a part of type image), but {lacks}")
    return {"type": "image", "image": image}


def _read_content(record: DataRecord, message: RawMessage) -> Iterator[ContentPart]:
    content, field = message.content, message.location
    if isinstance(content, str):
        if PARTS_AS_TEXT.match(content):
            raise record.make_error(field, "the content is text that contains a list of parts; store the list itself")
        yield from _split_text(record, content, field, message.role)
        return
    if not isinstance(content, list):
        raise record.make_error(field, f"its content must be text or a list of parts, not {type(content).__name__}")
    for number, part in enumerate(content):
        yield from _read_part(record, part, f"{field}.content[{number}]", message.role)


def _read_part(record: DataRecord, value: object, field: str, role: str) -> Iterator[ContentPart]:
    if isinstance(value, str):
        raise record.make_error(field, 'is plain text in a list of parts; write {"type": "text", "text": ..} instead')
    part = record.require_mapping(value, field)
    kind = part.get("type")
    if kind == "text":
        _check_keys(record, part, ("text",), field)
        if "text" not in part:
            raise record.make_error(f"{field}.text", "is missing; write the text, or remove the part")
        yield from _split_text(record, part["text"], field, role)
    elif kind in ("image", "image_url"):
        _check_keys(record, part, IMAGE_KEYS if kind == "image" else ("image_url",), field)
        _check_role(record, role, field)
        yield {"type": "image"} | _own_picture(record, part, field)
    else:
        told = PART_REMEDIES.get(kind, "") if isinstance(kind, str) else ""
        among = f"a part must be of type text, image or image_url, not {shorten(repr(kind))}"
        raise record.make_error(field, f"a part of type {kind} {told}" if told else among)


def _own_picture(record: DataRecord, part: Mapping[str, object], field: str) -> ContentPart:
    """Return {"image": ...} with the part's own image, or {} if the part is a placeholder."""
    if part["type"] == "image_url":
        given = part.get("image_url")
        if isinstance(given, Mapping):
            _check_keys(record, given, ("url", "detail"), f"{field}.image_url")
            if given.get("detail") == "low":
                raise record.make_error(
                    f"{field}.image_url.detail", "low is not supported, because model.max_pixels limits every image; remove this key"
                )
            given = given.get("url")
        return {"image": record.load_image(given, f"{field}.image_url")}
    held = {key: part[key] for key in IMAGE_KEYS if key in part}
    if len(held) > 1:
        raise record.make_error(field, f"has {' and '.join(held)}; keep one of them")
    for key, value in held.items():
        if isinstance(value, Mapping):
            _check_keys(record, value, ("bytes", "path"), f"{field}.{key}")
    pictures = [record.load_image(value, f"{field}.{key}") for key, value in held.items()]
    return {"image": pictures[0]} if pictures else {}


def _check_keys(record: DataRecord, part: Mapping[str, object], known: Sequence[str], field: str) -> None:
    for key, value in part.items():
        if key not in ("type", *known) and not is_empty(value):
            told = "model.min_pixels and model.max_pixels apply to all images" if "pixels" in key or "resized" in key else "is not read"
            raise record.make_error(f"{field}.{key}", f"{told}; remove this key")


def _check_role(record: DataRecord, role: str, field: str) -> None:
    if role not in IMAGE_ROLES:
        remedy = "only user and tool messages may contain images; move the image to one of them, or replace it with text"
        raise record.make_error(field, f"contains an image in a message with the role {role}: {remedy}")


def _split_text(record: DataRecord, value: object, field: str, role: str) -> Iterator[ContentPart]:
    """Split a text at each <image> and yield the pieces with an image placeholder between them."""
    text = record.require_text(value, field)
    if place := find_media_placeholder(text):
        known = f"write {IMAGE_PLACEHOLDER} at the position of an image (videos and audio are not supported)"
        raise record.make_error(field, f"contains {place}, which is a media placeholder: {known}; if it is plain text, reword the text")
    if place := find_object_placeholder(text):
        raise record.make_error(field, f"contains {place}, a placeholder that this trainer does not fill; write out the text instead")
    if IMAGE_PLACEHOLDER in text:
        _check_role(record, role, f"{field} ({IMAGE_PLACEHOLDER})")
    first, *others = text.split(IMAGE_PLACEHOLDER)
    if first:
        yield {"type": "text", "text": first}
    for piece in others:
        yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}
