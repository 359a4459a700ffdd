"""Messages between the sandbox server and its clients.

The messages are JSON with binary data in base64. The server and the client validate every message
that they receive.
"""

import base64
import binascii
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from megatron_rl_sandbox import image_codec
from megatron_rl_sandbox.inputs import MAX_INPUTS
from megatron_rl_sandbox.records import BoxLimits, CallResult, Fault

TRUNCATION_MARGIN = 200
"""Characters allowed beyond an output stream's limit, for the note about omitted characters."""
MAX_TEXT_CHARS = 8192
"""Maximum length of each text in a result, except the output streams (see replies.py)."""
MAX_DROPPED = 110
"""Maximum number of entries in `CallResult.dropped` beyond `BoxLimits.images` entries."""
MAX_NUMBER = 1 << 63


def decode_base64(text: str) -> bytes:
    """Decode base64. Raises ValueError if `text` is not valid base64."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def encode_base64(data: bytes) -> str:
    """Encode bytes as base64."""
    return base64.b64encode(data).decode()


class StrictRequest(BaseModel):
    """Request that rejects unknown keys, so that a misspelled key is not silently ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class OpenRequest(StrictRequest):
    """Body of a request to open a box."""

    images: Annotated[dict[str, str], Field(max_length=MAX_INPUTS)] = {}
    """Image files in base64, keyed by name."""
    files: Annotated[dict[str, str], Field(max_length=MAX_INPUTS)] = {}
    preload: str = ""
    wait_s: float | None = Field(default=None, ge=0)
    """Seconds to wait for a free box; the server's limit is the maximum and the default."""


class CallRequest(StrictRequest):
    """Body of a request to run a call."""

    call: Annotated[str, Field(min_length=1, max_length=64)]
    """Id of the call, chosen by the client and unique in its box.

    The server rejects an id that was used before, so a request that is sent twice runs only once.
    """
    code: str
    timeout_s: float | None = Field(default=None, gt=0)
    """Timeout of the call in seconds; the server's limit is the maximum and the default."""


class FetchRequest(StrictRequest):
    """Body of a request to fetch files."""

    names: Annotated[list[str], Field(max_length=1000)]


_RESULT: TypeAdapter[CallResult] = TypeAdapter(CallResult)


def encode_result(result: CallResult) -> dict[str, Any]:
    """Convert a result to JSON-compatible data."""
    pictures = [{**asdict(picture), "png": encode_base64(picture.png)} for picture in result.images]
    return {**asdict(result), "fault": result.fault.value, "images": pictures}


def decode_result(data: Any, *, limits: BoxLimits, budget: image_codec.ImageBudget) -> CallResult:
    """Validate the JSON of a response and convert it to a result.

    Raises:
        ValueError: The response is malformed or violates `limits` or `budget`. An image that is too
            large is rejected after decoding only its header.
    """
    if not isinstance(data, dict) or not isinstance(data.get("images"), list):
        raise ValueError("not a result")
    budget.begin_call()
    pictures = [_decode_image(item, limits=limits, budget=budget) for item in data["images"]]
    result = _RESULT.validate_python({**data, "images": pictures})
    error, usage = result.error, result.usage
    texts = [
        (result.text, limits.text + TRUNCATION_MARGIN),
        (result.stderr, limits.text + TRUNCATION_MARGIN),
        (result.limit or "", TRUNCATION_MARGIN),
    ]
    texts += [(text, MAX_TEXT_CHARS) for drop in result.dropped for text in (drop.what, drop.reason)]
    texts += [(text, MAX_TEXT_CHARS) for text in (*result.files, *(picture.source for picture in result.images))]
    texts += [(text, MAX_TEXT_CHARS) for text in (error.type, error.message, error.traceback)] if error else []
    if any(len(text) > most for text, most in texts):
        raise ValueError("a text exceeds its limit")
    if len(result.files) > limits.files or len(result.dropped) > limits.images + MAX_DROPPED:
        raise ValueError("too many files or notes on dropped output")
    numbers = (result.id, usage.wall_s, usage.cpu_s, usage.memory, *result.files.values())
    if not all(0 <= number < MAX_NUMBER for number in numbers):  # NaN fails the comparison
        raise ValueError("a number is out of range")
    if (result.fault is Fault.NONE) != (error is None):
        raise ValueError("a fault without an error, or an error without a fault")
    return result


def _decode_image(data: Any, *, limits: BoxLimits, budget: image_codec.ImageBudget) -> dict[str, Any]:
    if not isinstance(data, dict) or not isinstance(data.get("png"), str):
        raise ValueError("not an image")
    if len(data["png"]) > limits.image_bytes * 4 // 3 + 4:
        raise ValueError("an image exceeds image_bytes")
    png = decode_base64(data["png"])
    width, height = image_codec.read_png_size(png)
    refusal = image_codec.check_image_size(width=width, height=height, limits=limits) or budget.check_image(
        pixels=width * height, num_bytes=len(png)
    )
    if refusal is not None:
        raise ValueError(refusal)
    budget.count_image(pixels=width * height, num_bytes=len(png))
    if image_codec.check_png(png) != (data.get("width"), data.get("height")):
        raise ValueError("the size of an image differs from its declared size")
    return {**data, "png": png}


def max_response_bytes(limits: BoxLimits) -> int:
    """Return the maximum size in bytes of the response to a call.

    Images are counted as base64, and each character of text as six bytes (a JSON escape).
    """
    return limits.images * (limits.image_bytes * 4 // 3 + 4) + 6 * max_response_chars(limits)


def max_response_chars(limits: BoxLimits) -> int:
    """Return the maximum total number of characters in all texts of the response to a call."""
    return 2 * (limits.text + TRUNCATION_MARGIN) + MAX_TEXT_CHARS * (limits.files + 2 * limits.images + MAX_DROPPED + 3)


def count_json_delimiters(text: bytes) -> int:
    """Return the number of commas and opening brackets in JSON text.

    JSON text with n delimiters contains at most n keys and n + 1 values. Therefore, a limit on the
    number of delimiters bounds the time and memory for parsing. Base64 contains no delimiters.
    """
    return sum(map(text.count, (b",", b"[", b"{")))
