"""Where a service is: a file in the run folder, and a name that the service itself says when it is asked.

    RUN/services/judge.json      {"url": "http://10.0.0.1:40123/v1", "nonce": "5c1f..."}
A server that has died leaves its file, and another may have its port by now: an address is used where the one that answers says the nonce.
"""

import hmac
import json
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from pydantic import BaseModel

from megatron_rl.clients.endpoint_pool import KeyRefused, to_one_line
from megatron_rl.config.services import ServiceSettings
from megatron_rl.io.bounded_files import read_bytes
from megatron_rl.io.jsonl import replace_bytes
from megatron_rl.rollout.vllm.http_gate import MIDDLEWARE
from sandbox.access import CHALLENGE, PROOF, proof_of
from sandbox.bounded_http import DENIED, NoAnswer, request
from sandbox.token import read_token

FOLDER = "services"
ANSWER_S, MOST_BYTES = 2.0, 64 << 10
"""Limits of a server's answer to a health check, in seconds and bytes."""
MAX_BYTES = 16 << 10
"""Limit of a file that names an address."""


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
    key_remedy: str = "another server has its port, or it was started with another token; start it anew"


def _of_vllm(settings: ServiceSettings, name: str, nonce: str, token: Path) -> list[str]:
    gate = [] if settings.command else ["--middleware", MIDDLEWARE, "--disable-fastapi-docs"]
    return ["--model", settings.model, "--served-model-name", name, nonce, *gate]


KINDS: Mapping[str, Kind] = {
    "vllm": Kind(
        command=[sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
        options=_of_vllm,
        path="/v1", question="/models", names=lambda body: [model.id for model in _Models.model_validate_json(body).data],
        key_remedy="the run gives its command a key in VLLM_API_KEY; leave that as it is",
    ),
    "sandbox": Kind(
        command=[sys.executable, "-m", "sandbox", "serve"],
        options=lambda settings, name, nonce, token: ["--name", nonce, "--token-file", str(token)],
        path="", question="/health", names=lambda body: [_Health.model_validate_json(body).name],
    ),
    **{
        name: Kind(
            command=[sys.executable, "-m", f"megatron_rl.tasks.lewis.server.{name}_app"],
            options=lambda settings, name, nonce, token: ["--model", settings.model, "--name", nonce, "--token-file", str(token)],
            path="", question="/health", names=lambda body: [_Health.model_validate_json(body).name],
        )
        for name in ("listener", "speaker")
    },
}  # fmt: skip


def file_of(run: Path, name: str) -> Path:
    return run / FOLDER / f"{name}.json"


def token_file(run: Path, name: str) -> Path:
    """The file of the token that the run makes for a server; only the run's user reads it."""
    return run / FOLDER / f"{name}.token"


def publish(run: Path, name: str, *, url: str, nonce: str) -> None:
    replace_bytes(file_of(run, name), (json.dumps({"url": url, "nonce": nonce}) + "\n").encode())


def proves(settings: ServiceSettings) -> bool:
    """Return whether the service proves that it knows its token before that is sent (sandbox/access.py).

    A vLLM server that may have an environment of its own (services.X.command) has no gate, and cannot.
    """
    return settings.kind != "vllm" or not settings.command


def find(run: Path, name: str, kind: str, *, is_gated: bool = True) -> str:
    """The published address, if the service is there that published it; else nothing. `is_gated`, KeyRefused: see is_there."""
    try:
        published = _Published.model_validate_json(read_bytes(file_of(run, name), at_most=MAX_BYTES))
    except (OSError, ValueError):
        return ""
    is_it = is_there(published.url, kind, nonce=published.nonce, token=token_file(run, name), is_gated=is_gated)
    return published.url if is_it else ""


def is_there(url: str, kind: str, *, nonce: str, token: Path, is_gated: bool = True) -> bool:
    """Return whether the service of this nonce answers at the address. It receives its own token and no key of the user.

    Whoever lists processes knows its port and its nonce: without a proof of the token (`is_gated`, see proves) a stranger who takes the
    port first is taken for it. KeyRefused: one answers that does not accept the token.
    """
    try:
        own = read_token(token)
        if is_gated and not is_proven(url, token=own):
            return False
        answer = request("GET", url + KINDS[kind].question, limit_s=ANSWER_S, max_bytes=MOST_BYTES, token=own)
        if answer.status in DENIED:
            raise KeyRefused(f"{url} answers {answer.status}, {to_one_line(answer.text)}: {KINDS[kind].key_remedy}")
        return nonce in KINDS[kind].names(answer.content)
    except (NoAnswer, ValueError):  # no token; pydantic's ValidationError is a ValueError
        return False


def is_proven(url: str, *, token: str) -> bool:
    """Return whether the server proves that it knows the token, without sending it the token (sandbox/access.py)."""
    challenge = secrets.token_hex(16)
    try:
        answer = request("GET", urljoin(url, "/health"), limit_s=ANSWER_S, max_bytes=MOST_BYTES, headers={CHALLENGE: challenge})
    except NoAnswer:
        return False
    expected = proof_of(token, challenge, port=urlsplit(url).port)
    return hmac.compare_digest(answer.headers.get(PROOF, "").encode(), expected.encode())
