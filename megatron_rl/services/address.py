"""Where a service is: a file in the run folder, and a name that the service itself says when it is asked.

    RUN/services/judge.json      {"url": "http://10.0.0.1:40123/v1", "nonce": "5c1f..."}
A server that has died leaves its file, and another may have its port by now: an address is used where the one that answers says the nonce.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import BaseModel, ValidationError

from megatron_rl.config.services import ServiceSettings
from megatron_rl.jsonl import replace_bytes

FOLDER = "services"
ANSWER_S = 2.0


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


class _Health(BaseModel):
    name: str


class _Published(BaseModel):
    url: str
    nonce: str


@dataclass(slots=True, frozen=True, kw_only=True)
class Kind:
    """How servers of a kind are started and asked."""

    command: list[str]
    options: Callable[[ServiceSettings, str, str], list[str]]
    """(settings, its name, its nonce) -> arguments of the command, beside --host and --port."""
    path: str
    """Of the address that clients are given."""
    question: str
    names: Callable[[bytes], list[str]]
    """Of the answer's body: what it calls itself. ValidationError: it is another server."""


def _of_vllm(settings: ServiceSettings, name: str, nonce: str) -> list[str]:
    return ["--model", settings.model, "--served-model-name", name, nonce]


KINDS: Mapping[str, Kind] = {
    "vllm": Kind(
        command=[sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
        options=_of_vllm,
        path="/v1", question="/models", names=lambda body: [model.id for model in _Models.model_validate_json(body).data],
    ),
    "sandbox": Kind(
        command=[sys.executable, "-m", "sandbox", "serve"],
        options=lambda settings, name, nonce: ["--name", nonce],
        path="", question="/health", names=lambda body: [_Health.model_validate_json(body).name],
    ),
}  # fmt: skip


def file_of(run: Path, name: str) -> Path:
    return run / FOLDER / f"{name}.json"


def publish(run: Path, name: str, *, url: str, nonce: str) -> None:
    replace_bytes(file_of(run, name), (json.dumps({"url": url, "nonce": nonce}) + "\n").encode())


def find(run: Path, name: str, kind: str) -> str:
    """The published address, if the service is there that published it; else nothing."""
    try:
        published = _Published.model_validate_json(file_of(run, name).read_bytes())
    except (OSError, ValidationError):
        return ""
    return published.url if is_there(published.url, kind, nonce=published.nonce) else ""


def is_there(url: str, kind: str, *, nonce: str) -> bool:
    """Whether the service of this nonce answers at the address."""
    try:
        answer = httpx.get(url + KINDS[kind].question, timeout=ANSWER_S, trust_env=False, headers=_key())
        return nonce in KINDS[kind].names(answer.content)
    except (httpx.HTTPError, httpx.InvalidURL, ValidationError):
        return False


def _key() -> dict[str, str]:
    """A server that was started with --api-key takes that of the judge's clients."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}
