"""Converts rollouts to plain JSON values (`to_record`) and back (`from_record`).

The conversion is exact, bit for bit. A record contains every field of the classes Rollout,
TokenSequence, Turn, ToolCall and JudgeResult (types.py) except NOT_RECORDED, keyed by field name.
Fields that are added to these classes are recorded automatically; increase VERSION when you add a
field. Images are saved and loaded by name, through functions passed by the caller. Image patches
are not recorded; Renderer.patches recomputes them. A record is written as one line by
jsonl.to_json_line, which converts NaN and infinite numbers to strings.

    {"version": 10, "images": {KEY: {"name": NAME, "grid": [1, 8, 8], "merge": 2}},
     "task": "number_line", ...,
     "sequences": [{"token_ids": [5, 6, 7], "loss_mask": [0, 0, 1], ..., "images": [KEY]}],
     "turns": [{"sequence": 0, "token_span": [2, 3], ...}]}
"""

import base64
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from operator import index
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin, get_type_hints

from megatron_rl.io.jsonl import NON_FINITE_NUMBERS
from megatron_rl.types import TOKEN_COLUMNS, Image, JudgeResult, Rollout, TokenSequence, ToolCall, Turn

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

VERSION = 10
"""Version of the record format. Records of other versions are rejected."""
IMAGE_KEY_PATTERN = re.compile(r"[0-9A-Za-z]{1,64}")
"""Pattern of a valid image key, which is used as a file name."""
MAX_PATCHES = 1 << 24
"""Maximum number of patches per image, which corresponds to about three gigapixels. A damaged grid
with more patches could make a reader allocate too much memory.
"""
NOT_RECORDED = ("teacher_top",)
"""Fields that are not recorded, because they are larger than all others together."""
RECORD_FIELDS = {
    kind: {name: annotation for name, annotation in get_type_hints(kind).items() if name not in NOT_RECORDED}
    for kind in (Rollout, TokenSequence, Turn, ToolCall, JudgeResult)
}
"""Names and type annotations of the recorded fields of each recorded class."""


def to_record(rollout: Rollout, save_image: Callable[[Image], str]) -> dict[str, Any]:
    """Return a rollout as JSON values, in which floats may be NaN or infinite.

    `save_image` saves an image and returns the image's name. `save_image` is called once for each
    distinct image.
    """
    images: dict[str, Image] = {}
    fields = _encode(Rollout, rollout, images)
    pictures = {key: {"name": save_image(image), "grid": list(image.grid), "merge": image.merge} for key, image in images.items()}
    return {"version": VERSION, "images": pictures, **fields}


def from_record(record: Any, load_image: Callable[[str], "Picture | None"]) -> Rollout:
    """Return the rollout that was passed to `to_record`, with Image.patch_PC set to None.

    `load_image` is called with the name of each image, and returns the image. `load_image` may
    return None if images are not needed. The record is untrusted input.

    Raises:
        ValueError: The record is damaged or has a different version. The message is one line.
    """
    _require(isinstance(record, dict), "record", record, "not an object")
    _require(record.get("version") == VERSION, "version", record.get("version"), f"this program reads {VERSION}")
    images = _decode_images(record.get("images"), load_image)
    fields = {name: value for name, value in record.items() if name not in ("version", "images")}
    rollout = _decode(Rollout, fields, "rollout", images)
    for number, context in enumerate(rollout.sequences):
        _check_sequence(context, f"sequences[{number}]")
    if rollout.final_state is not None:
        _check_sequence(rollout.final_state, "final_state")
    for number, turn in enumerate(rollout.turns):
        _check_turn(turn, rollout.sequences, f"turns[{number}]")
    return rollout


def _encode(annotation: Any, value: Any, images: dict[str, Image]) -> Any:
    """Convert a value of type `annotation` to JSON, and add its images to the dict `images`."""
    parts = get_args(annotation)
    if annotation in RECORD_FIELDS:
        return {name: _encode(part, getattr(value, name), images) for name, part in RECORD_FIELDS[annotation].items()}
    if annotation is Image:
        images.setdefault(value.key, value)
        return value.key
    if annotation in _ENCODERS:
        return _ENCODERS[annotation](value)
    if get_origin(annotation) is dict:
        return {str(key): _encode(parts[1], each, images) for key, each in value.items()}
    if get_origin(annotation) is list and parts[0] in _ENCODERS:  # faster for thousands of tokens
        return list(map(_ENCODERS[parts[0]], value))
    if get_origin(annotation) is list:
        return [_encode(parts[0], each, images) for each in value]
    if get_origin(annotation) is tuple:
        return [_encode(part, each, images) for part, each in zip(parts, value, strict=True)]
    if NoneType in parts:
        return None if value is None else _encode(parts[0], value, images)
    assert issubclass(annotation, StrEnum), f"io/rollout_codec.py cannot encode {annotation}"
    return str(value)


def _decode(annotation: Any, value: Any, where: str, images: Mapping[str, Image]) -> Any:
    """Decode a JSON value produced by `_encode` into a value of type `annotation`.

    Raises:
        ValueError: `value` cannot be of type `annotation`.
    """
    parts = get_args(annotation)
    if annotation in RECORD_FIELDS:
        return _decode_fields(annotation, value, where, images)
    if annotation is Image:
        _require(isinstance(value, str) and value in images, where, value, "not one of the record's images")
        return images[value]
    if annotation in _DECODERS:
        return _DECODERS[annotation](value, where)
    if get_origin(annotation) is dict:
        _require(isinstance(value, dict) and all(isinstance(key, str) for key in value), where, value, "not an object with string keys")
        return {key: _decode(parts[1], each, f"{where}[{reprlib.repr(key)}]", images) for key, each in value.items()}
    if get_origin(annotation) is list:
        _require(isinstance(value, list), where, value, "not a list")
        if parts[0] in _DECODERS:
            return [_DECODERS[parts[0]](each, where) for each in value]
        return [_decode(parts[0], each, f"{where}[{number}]", images) for number, each in enumerate(value)]
    if get_origin(annotation) is tuple:
        _require(isinstance(value, list) and len(value) == len(parts), where, value, f"not {len(parts)} values")
        return tuple(_decode(part, each, where, images) for part, each in zip(parts, value, strict=True))
    if NoneType in parts:
        return None if value is None else _decode(parts[0], value, where, images)
    names = [each.value for each in annotation]
    _require(isinstance(value, str) and value in names, where, value, f"not one of {', '.join(names)}")
    return annotation(value)


def _decode_fields(kind: Any, value: Any, where: str, images: Mapping[str, Image]) -> Any:
    fields = RECORD_FIELDS[kind]
    _require(isinstance(value, dict), where, value, "not an object")
    for names, why in ((fields.keys() - value.keys(), "lacking"), (value.keys() - fields.keys(), "no such field")):
        _require(not names, where, sorted(map(str, names)), why)
    return kind(**{name: _decode(part, value[name], f"{where}.{name}", images) for name, part in fields.items()})


def _decode_images(value: Any, load: Callable[[str], "Picture | None"]) -> dict[str, Image]:
    _require(isinstance(value, dict) and all(isinstance(key, str) for key in value), "images", value, "not an object with string keys")
    images = {}
    for key, each in value.items():
        where = f"images[{reprlib.repr(key)}]"
        _require(IMAGE_KEY_PATTERN.fullmatch(key) is not None, "images", key, "not an image key")
        _require(
            isinstance(each, dict) and each.keys() == {"name", "grid", "merge"}, where, each, "not an object with name, grid and merge"
        )
        grid = _decode(tuple[int, int, int], each["grid"], where, {})
        _require(min(grid) > 0 and math.prod(grid) <= MAX_PATCHES, where, each["grid"], "not a grid of patches")
        merge = _decode(int, each["merge"], where, {})
        _require(merge > 0 and not any(side % merge for side in grid[1:]), where, merge, "does not divide the grid")
        images[key] = Image(pil=load(_text(each["name"], where)), patch_PC=None, grid=grid, key=key, merge=merge)
    return images


def _check_sequence(context: TokenSequence, where: str) -> None:
    length = len(context.token_ids)
    for name in RECORD_FIELDS[TokenSequence].keys() - {"images"}:
        column = getattr(context, name)
        is_partial = (name in TOKEN_COLUMNS and not column) or (name == "routed_experts" and len(column) < length)
        is_aligned = len(column) == length or is_partial
        _require(is_aligned, f"{where}.{name}", len(column), f"not equal to the {length} tokens")
    _require(min(context.token_ids, default=0) >= 0, f"{where}.token_ids", context.token_ids, "contains negative token ids")
    _require({0, 1}.issuperset(context.loss_mask), f"{where}.loss_mask", context.loss_mask, "contains values other than 0 and 1")


def _check_turn(turn: Turn, contexts: list[TokenSequence], where: str) -> None:
    _require(0 <= turn.sequence < len(contexts), f"{where}.sequence", turn.sequence, f"not an index of {len(contexts)} sequences")
    (start, stop), length = turn.token_span, len(contexts[turn.sequence].token_ids)
    _require(0 <= start <= stop <= length, f"{where}.token_span", turn.token_span, f"not within the {length} tokens of its sequence")
    _require(
        turn.action_start is None or start <= turn.action_start < stop,
        f"{where}.action_start",
        turn.action_start,
        f"not within the span {turn.token_span}",
    )


def _integer(value: Any, where: str) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        _refuse(where, value, "not a 64-bit integer")
    return value


def _number(value: Any, where: str) -> float:
    if type(value) is float:
        return value
    if type(value) is str and value in NON_FINITE_NUMBERS:
        return NON_FINITE_NUMBERS[value]
    if type(value) is not int or abs(value) > 1 << 53:
        _refuse(where, value, "not a number")
    return float(value)


def _text(value: Any, where: str) -> str:
    _require(isinstance(value, str), where, value, "not a string")
    return value


def _bytes(value: Any, where: str) -> bytes:
    text = _text(value, where)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error is a ValueError
        _refuse(where, value, "not base64")


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _boolean(value: Any, where: str) -> bool:
    _require(isinstance(value, bool), where, value, "not a boolean")
    return value


def _require(is_valid: bool, where: str, value: object, why: str) -> None:
    if not is_valid:
        _refuse(where, value, why)


def _refuse(where: str, value: object, why: str) -> NoReturn:
    raise ValueError(f"rollout record: {where}: {reprlib.repr(value)}: {why}")


_ENCODERS: Mapping[Any, Callable[[Any], Any]] = {int: index, float: float, str: str, bool: bool, bytes: _to_base64}
"""Functions that convert values from user-defined environments and rewards, such as NumPy scalars,
to the annotated type.
"""
_DECODERS: Mapping[Any, Callable[[Any, str], Any]] = {int: _integer, float: _number, str: _text, bool: _boolean, bytes: _bytes}
