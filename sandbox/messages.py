"""What travels between server and client: JSON with binary as base64. Each side checks what it reads."""

import base64
import binascii
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from sandbox.types import Result

BODY_BYTES = 128 << 20
"""The largest request: all images and files of a box as base64, and its preload."""


def decoded(text: str) -> bytes:
    """Raises ValueError for what is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Strict(BaseModel):
    """A misspelled key is an error of the caller's, not a default of ours."""

    model_config = ConfigDict(extra="forbid")


class OpenRequest(Strict):
    images: dict[str, str] = {}
    """name -> an image file as base64"""
    files: dict[str, str] = {}
    preload: str = ""
    wait_s: float | None = Field(default=None, ge=0)
    """For how long to wait for a free box, at most what the server allows."""


class CallRequest(Strict):
    call: Annotated[str, Field(min_length=1, max_length=64)]
    """The caller's name for this call, used once per box: what is sent twice by accident does not run twice."""
    code: str
    timeout_s: float | None = Field(default=None, gt=0)


class FetchRequest(Strict):
    names: Annotated[list[str], Field(max_length=1000)]


_RESULT: TypeAdapter[Result] = TypeAdapter(Result)


def result_to_wire(result: Result) -> dict[str, Any]:
    pictures = [{**asdict(picture), "png": encoded(picture.png)} for picture in result.images]
    return {**asdict(result), "fault": result.fault.value, "images": pictures}


def result_from_wire(data: dict[str, Any]) -> Result:
    """Raises ValueError for anything that no server of ours sends."""
    pictures = [{**picture, "png": decoded(picture["png"])} for picture in data["images"]]
    return _RESULT.validate_python({**data, "images": pictures})
