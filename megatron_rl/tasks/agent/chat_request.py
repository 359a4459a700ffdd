"""Parses requests in the format of OpenAI's chat completions.

The policy is trained on what it samples, so its sampling settings are those of the run. Settings of
a request that would change the distribution of single tokens are replaced by the run's and counted.
Settings that the policy cannot follow at all are rejected, unless the run ignores them
(task.options.ignore), which is counted as well.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

from PIL.Image import Image as Picture
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_rl.data.image_bytes import decode_data_url
from megatron_rl.data.images import StoredImage
from megatron_rl.data.tool_calls import MAX_CALLS, MAX_TOOLS, CallInMessage, FunctionCall, ToolSchema, dump_tools, parse_calls
from megatron_rl.errors import InfraError
from megatron_rl.rollout.engine import ResponseSize
from megatron_rl.types import Message

MODEL = "policy"
"""Name of the model that the endpoint serves."""
REPLACED = {
    "temperature", "top_p", "seed", "max_tokens", "max_completion_tokens", "frequency_penalty", "presence_penalty", "top_k", "min_p",
    "repetition_penalty",
}  # fmt: skip
"""Settings of a request that are replaced by those of the run."""
WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "reasoning_effort", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "verbosity",
}  # fmt: skip
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "logit_bias": ({},), "response_format": ({"type": "text"},), "functions": ([],), "function_call": ("none", "auto"),
    "logprobs": (False,), "top_logprobs": (0,), "modalities": (["text"],),
}  # fmt: skip
"""Values of the unsupported settings that change nothing; other values are rejected or ignored."""
NEUTRAL_IF_REPLACED: Mapping[str, object] = {"tool_choice": "auto", "parallel_tool_calls": True}
"""Values of further settings that need not be replaced, because the policy follows them anyway."""
VISION_MARKERS = re.compile(r"<\|(?:vision_start|vision_end|vision_pad|image_pad|video_pad)\|>")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
IMAGE_ROLES = ("user", "tool")
MAX_MESSAGES, MAX_IMAGES = 2000, 256
"""Maximum number of messages and images in a request."""
MAX_CHOICES = 64
IGNORE_SETTING = "task.options.ignore=[{name}]"
"""Setting that makes the endpoint of a run ignore a setting of requests."""
MAX_STOP_STRINGS, MAX_STOP_CHARS = 4, 64


class RequestError(ValueError):
    """A request that the endpoint rejects, with the fields of OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "unsupported_value", status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def to_json(self) -> dict[str, object]:
        """Return the body of the response."""
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class ImageUrl(BaseModel):
    """Image of a content part."""

    url: str
    detail: str | None = None


class ContentPart(BaseModel):
    """Text or image of a message."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "image_url"]
    text: str = ""
    image_url: ImageUrl | None = None
    cache_control: object = None


class ChatMessage(BaseModel):
    """Message of a request. Other fields of OpenAI's messages must be null or empty."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CallInMessage] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = None


class ChatBody(BaseModel):
    """Body of a request."""

    model_config = ConfigDict(extra="allow")
    model: str
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[ToolSchema] | None = Field(None, max_length=MAX_TOOLS)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


@dataclass(slots=True, frozen=True)
class ChatRequest:
    """Parsed request."""

    messages: list[Message]
    keys: list[str]
    """Digest of each message: its role, texts, tool calls and the pixels of its images; the first
    key depends on the tools as well. Messages with equal keys have the same meaning for the policy:
    they may differ in how an image or the arguments of a call are encoded.
    """
    is_streamed: bool
    has_usage_chunk: bool
    """True if the client requests the token counts at the end of a stream."""
    replaced: tuple[str, ...]
    """Names of the settings in the request that were replaced by those of the run, or ignored."""
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    """Strings that end the response."""
    has_tools: bool = False
    model: str = MODEL
    """Name of the model in the request."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Further settings of the request, such as `temperature`, as they are."""


@dataclass(slots=True, frozen=True)
class ChatResponse:
    """Response of the policy to one request."""

    content: str
    calls: tuple[FunctionCall, ...]
    size: ResponseSize | None
    """Numbers of tokens; None if unknown."""
    history: str = ""
    """Source of the prompt's tokens (inference.py); empty if not reported."""
    ignored: tuple[str, ...] = ()
    """Settings of the request that had no effect; empty if not reported."""


def parse_request(
    body: bytes, *, ignored: Sequence[str] = (), max_images: int = MAX_IMAGES, ignore_setting: str = IGNORE_SETTING
) -> ChatRequest:
    """Parse and check a request. Images are decoded, so call this function in a thread.

    Args:
        body: JSON.
        ignored: Unsupported settings that are ignored if a request has them.
        max_images: Maximum number of images.
        ignore_setting: Setting that ignores the unsupported setting `{name}`, for error messages.

    Raises:
        RequestError: The request is invalid, or asks for something that is not supported.
    """
    try:
        asked = ChatBody.model_validate_json(body)
    except ValidationError as error:
        mistakes = error.errors(include_url=False, include_input=False, include_context=False)
        deepest = max(mistakes, key=lambda mistake: len(mistake["loc"]))  # content may be text or a list; the list's error is more precise
        param = ".".join(str(place) for place in deepest["loc"] if place != "list[ContentPart]")[:100] or "body"
        raise RequestError(f"{param}: {deepest['msg'][:200]}", param=param, code="invalid_value") from error
    extra = asked.model_extra or {}
    replaced = {name for name, value in extra.items() if _is_replaced(name, value, ignored, ignore_setting)} | (
        {"model"} if asked.model != MODEL else set()
    )
    stop = _parse_stop(asked.stop)
    parts = (part for message in asked.messages if isinstance(message.content, list) for part in message.content)
    num_images = sum(part.type == "image_url" for part in parts)
    if num_images > max_images:
        raise RequestError(f"messages: {num_images} images; at most {max_images} are allowed", param="messages")
    messages = [_parse_message(message, f"messages[{index}]") for index, message in enumerate(asked.messages)]
    if messages[-1]["role"] == "assistant":
        raise RequestError(f"messages[{len(messages) - 1}]: the last message is the assistant's; add a user message", param="messages")
    if asked.tools:
        messages[0] = {**messages[0], "tools": dump_tools(asked.tools)}
    return ChatRequest(
        messages=messages,
        keys=[message_key(message) for message in messages],
        is_streamed=bool(asked.stream),
        has_usage_chunk=bool((asked.stream_options or {}).get("include_usage")),
        replaced=tuple(sorted(replaced)),
        num_choices=asked.n or 1,
        stop=stop,
        has_tools=bool(asked.tools),
        model=asked.model,
        settings=extra,
    )


def _is_replaced(name: str, value: object, ignored: Sequence[str], ignore_setting: str) -> bool:
    """Return True if a setting is replaced or ignored, and False if it has no effect."""
    if value is None or name in WITHOUT_EFFECT or value in NEUTRAL.get(name, ()) or value == NEUTRAL_IF_REPLACED.get(name, ()):
        return False
    if name in REPLACED or name in NEUTRAL_IF_REPLACED or name in ignored:
        return True
    if name not in NEUTRAL:
        raise RequestError(f"{name[:60]}: unknown setting; remove it", param=name[:60], code="unknown_parameter")
    remedy = f"remove this setting, or add it to {ignore_setting.format(name=name)}"
    raise RequestError(f"{name}: {json.dumps(value)[:60]} is not supported; {remedy}", param=name)


def _parse_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOP_STRINGS or not all(1 <= len(each) <= MAX_STOP_CHARS for each in strings):
        raise RequestError(f"stop: at most {MAX_STOP_STRINGS} strings with 1 to {MAX_STOP_CHARS} characters are allowed", param="stop")
    return tuple(strings)


def _parse_message(message: ChatMessage, where: str) -> Message:
    if message.role not in ROLES:
        raise RequestError(f"{where}.role: {message.role[:40]!r} is not supported; use {', '.join(ROLES)}", param=f"{where}.role")
    unknown = next((name for name, value in (message.model_extra or {}).items() if value not in (None, "", [], {})), None)
    if unknown is not None:
        raise RequestError(f"{where}.{unknown[:60]}: is not supported; remove this field", param=where)
    content = message.content if message.content is not None else ""
    parts = [ContentPart(type="text", text=content)] if isinstance(content, str) else content
    role = ROLES[message.role]
    found: list[dict[str, object]] = []
    for index, part in enumerate(parts):
        if part.type == "image_url":
            found.append({"type": "image", "image": _open_image(part, role, f"{where}.content[{index}]")})
        elif found and found[-1]["type"] == "text":
            found[-1] = {"type": "text", "text": f"{found[-1]['text']}{part.text}"}
        elif part.text:
            found.append({"type": "text", "text": part.text})
    calls = _parse_message_calls(message, role, where)
    written = [str(part.get("text", "")) for part in found] + [call.key for call in calls]
    if role == "assistant" and any(VISION_MARKERS.search(text) for text in written):
        raise RequestError(f"{where}: contains a vision marker, which the policy never samples; remove it", param=where)
    return {"role": role, "content": found, **({"tool_calls": [call.to_message() for call in calls]} if calls else {})}


def _parse_message_calls(message: ChatMessage, role: str, where: str) -> list[FunctionCall]:
    if message.tool_calls and role != "assistant":
        raise RequestError(f"{where}.tool_calls: only assistant messages have calls; remove this field", param=where)
    try:
        return parse_calls(message.tool_calls or [])
    except ValueError as error:
        raise RequestError(f"{where}.tool_calls: {error}", param=where, code="invalid_value") from error


def _open_image(part: ContentPart, role: str, where: str) -> Picture:
    url = part.image_url.url if part.image_url is not None else ""
    if role not in IMAGE_ROLES:
        raise RequestError(f"{where}: an image in a message of the {role}; move it to a user message", param=where)
    if not url.lstrip()[:5].lower() == "data:":
        raise RequestError(f"{where}.image_url.url: only data: URLs are supported, not {url[:60]!r}", param=where, code="invalid_image_url")
    try:
        return StoredImage(decode_data_url(url), where=where).open()
    except (ValueError, InfraError) as error:
        raise RequestError(f"{where}: {str(error).removeprefix(f'{where}: ')[:200]}", param=where, code="invalid_image_url") from error


def make_response_message(content: str, calls: Sequence[FunctionCall] = ()) -> Message:
    """Return a response as the message that a later request contains."""
    parts = [{"type": "text", "text": content}] if content else []
    return {"role": "assistant", "content": parts, **({"tool_calls": [call.to_message() for call in calls]} if calls else {})}


def message_key(message: Message) -> str:
    """Return a digest of a message with content parts; equal images have equal pixels."""
    digest = hashlib.blake2b(message["role"].encode(), digest_size=16)
    for part in message["content"]:
        if part["type"] == "text":
            content = part["text"].encode()
        else:
            picture: Picture = part["image"]
            content = f"{picture.mode} {picture.size} ".encode() + picture.tobytes()
        digest.update(f"\0{part['type']} {len(content)}\0".encode() + content)
    if "tool_calls" in message:
        digest.update(f"\0tool_calls {json.dumps(message['tool_calls'], sort_keys=True)}".encode())
    if "tools" in message:
        digest.update(f"\0tools {json.dumps(message['tools'])}".encode())
    return digest.hexdigest()
