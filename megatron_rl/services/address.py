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

from pydantic import BaseModel, ValidationError

from megatron_rl.config.services import ServiceSettings
from megatron_rl.jsonl import replace_bytes
from megatron_rl.servers import KeyRefused, one_line
from sandbox.bounded_http import DENIED, NoAnswer, request

FOLDER = "services"
ANSWER_S, MOST_BYTES = 2.0, 64 << 10
"""Of a server's answer to the question whether it is there."""


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
    options: Callable[[ServiceSettings, str, str, Path], list[str]]
    """(settings, its name, its nonce, the file of its token) -> arguments of the command, beside --host and --port."""
    path: str
    """Of the address that clients are given."""
    question: str
    names: Callable[[bytes], list[str]]
    """Of the answer's body: what it calls itself. ValidationError: it is another server."""
    token: Callable[[Path], str]
    """(the file of its token) -> what it asks for; empty where it asks for nothing."""
    key_remedy: str = "another server has its port, or it was started with another token; start it anew"


def _of_vllm(settings: ServiceSettings, name: str, nonce: str, token: Path) -> list[str]:
    return ["--model", settings.model, "--served-model-name", name, nonce]


def _own_token(file: Path) -> str:
    return file.read_text() if file.exists() else ""


KINDS: Mapping[str, Kind] = {
    "vllm": Kind(
        command=[sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
        options=_of_vllm,
        path="/v1", question="/models", names=lambda body: [model.id for model in _Models.model_validate_json(body).data],
        token=lambda file: os.environ.get("OPENAI_API_KEY", ""),  # one that was started with --api-key takes that of the judge's clients
        key_remedy="give OPENAI_API_KEY the value of the server's VLLM_API_KEY, or unset both",
    ),
    "sandbox": Kind(
        command=[sys.executable, "-m", "sandbox", "serve"],
        options=lambda settings, name, nonce, token: ["--name", nonce, "--token-file", str(token)],
        path="", question="/health", names=lambda body: [_Health.model_validate_json(body).name],
        token=_own_token,
    ),
    **{
        name: Kind(
            command=[sys.executable, "-m", f"megatron_rl.services.{name}"],
            options=lambda settings, name, nonce, token: ["--model", settings.model, "--name", nonce, "--token-file", str(token)],
            path="", question="/health", names=lambda body: [_Health.model_validate_json(body).name],
            token=_own_token,
        )
        for name in ("listener", "speaker")
    },
}  # fmt: skip


def file_of(run: Path, name: str) -> Path:
    return run / FOLDER / f"{name}.json"


def token_file(run: Path, name: str) -> Path:
    """What a server of ours asks its clients for; only the run's user reads it."""
    return run / FOLDER / f"{name}.token"


def publish(run: Path, name: str, *, url: str, nonce: str) -> None:
    replace_bytes(file_of(run, name), (json.dumps({"url": url, "nonce": nonce}) + "\n").encode())


def find(run: Path, name: str, kind: str) -> str:
    """The published address, if the service is there that published it; else nothing. KeyRefused: see is_there."""
    try:
        published = _Published.model_validate_json(file_of(run, name).read_bytes())
    except (OSError, ValidationError):
        return ""
    return published.url if is_there(published.url, kind, nonce=published.nonce, token=token_file(run, name)) else ""


def is_there(url: str, kind: str, *, nonce: str, token: Path) -> bool:
    """Whether the service of this nonce answers at the address. A server of another kind is not told the judge's key.

    KeyRefused: one answers that does not accept the key or token.
    """
    try:
        answer = request("GET", url + KINDS[kind].question, limit_s=ANSWER_S, max_bytes=MOST_BYTES, token=KINDS[kind].token(token))
    except NoAnswer:
        return False
    if answer.status in DENIED:
        raise KeyRefused(f"{url} answers {answer.status}, {one_line(answer.text)}: {KINDS[kind].key_remedy}")
    try:
        return nonce in KINDS[kind].names(answer.content)
    except ValidationError:
        return False
