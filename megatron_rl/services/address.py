"""Publishes service addresses as files in the run directory, and verifies addresses with nonces.

    RUN/services/judge.json      {"url": "http://10.0.0.1:40123/v1", "nonce": "5c1f..."}

If a server dies, its address file remains, and another server may take over its port. An address is
therefore used only if the server at this address reports the nonce in the file.
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
from megatron_rl.io.jsonl import write_bytes_atomically
from megatron_rl.rollout.vllm.http_gate import MIDDLEWARE
from megatron_rl_sandbox.access import CHALLENGE_HEADER, PROOF_HEADER, compute_proof
from megatron_rl_sandbox.bounded_http import DENIED_STATUSES, NoResponse, send_request
from megatron_rl_sandbox.token import read_token

SERVICES_FOLDER = "services"
HEALTH_TIMEOUT_S, MAX_HEALTH_BYTES = 2.0, 64 << 10
"""Timeout in seconds of a health check, and maximum size in bytes of its reply."""
MAX_ADDRESS_BYTES = 16 << 10
"""Maximum size of an address file in bytes."""


class _ServedModel(BaseModel):
    id: str


class _ServedModels(BaseModel):
    data: list[_ServedModel]


class _ServiceHealth(BaseModel):
    name: str


class _PublishedAddress(BaseModel):
    url: str
    nonce: str


@dataclass(slots=True, frozen=True, kw_only=True)
class ServiceKind:
    """Command and health check for one kind of server."""

    command: list[str]
    make_options: Callable[[ServiceSettings, str, str, Path], list[str]]
    """Function (settings, name, nonce, token file) -> arguments of the command, except --host and
    --port.
    """
    url_path: str
    """Path that is appended to http://HOST:PORT to form the address that clients use."""
    health_path: str
    """Path of the health check, which is appended to the address."""
    read_names: Callable[[bytes], list[str]]
    """Function that returns the names in the response body of a health check.

    If the server is the expected service, the nonce is one of these names. Raises ValidationError
    if the body comes from a different kind of server.
    """
    key_remedy: str = "another server uses the port of the service, or the service was started with another token; restart the service"
    """Fix that the error message suggests when a server rejects the token."""


def _vllm_options(settings: ServiceSettings, name: str, nonce: str, token: Path) -> list[str]:
    gate = [] if settings.command else ["--middleware", MIDDLEWARE, "--disable-fastapi-docs"]
    return ["--model", settings.model, "--served-model-name", name, nonce, *gate]


SERVICE_KINDS: Mapping[str, ServiceKind] = {
    "vllm": ServiceKind(
        command=[sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
        make_options=_vllm_options,
        url_path="/v1", health_path="/models", read_names=lambda body: [model.id for model in _ServedModels.model_validate_json(body).data],
        key_remedy="the run passes a key to its command in VLLM_API_KEY; do not change it",
    ),
    "sandbox": ServiceKind(
        command=[sys.executable, "-m", "megatron_rl_sandbox", "serve"],
        make_options=lambda settings, name, nonce, token: ["--name", nonce, "--token-file", str(token)],
        url_path="", health_path="/health", read_names=lambda body: [_ServiceHealth.model_validate_json(body).name],
    ),
    **{
        name: ServiceKind(
            command=[sys.executable, "-m", f"megatron_rl.tasks.lewis.server.{name}_app"],
            make_options=lambda settings, name, nonce, token: ["--model", settings.model, "--name", nonce, "--token-file", str(token)],
            url_path="", health_path="/health", read_names=lambda body: [_ServiceHealth.model_validate_json(body).name],
        )
        for name in ("listener", "speaker")
    },
}  # fmt: skip


def address_file(run: Path, name: str) -> Path:
    """Return the path of a service's address file."""
    return run / SERVICES_FOLDER / f"{name}.json"


def token_file(run: Path, name: str) -> Path:
    """Return the path of the token file that the run creates for a server.

    Only the user who started the run can read the file.
    """
    return run / SERVICES_FOLDER / f"{name}.token"


def publish_address(run: Path, name: str, *, url: str, nonce: str) -> None:
    """Write the address file of a service."""
    write_bytes_atomically(address_file(run, name), (json.dumps({"url": url, "nonce": nonce}) + "\n").encode())


def can_prove_token(settings: ServiceSettings) -> bool:
    """Return True if the service can prove that it knows its token.

    The service sends the proof (described in sandbox/access.py) before it receives the token. A
    vLLM server with a custom command (services.X.command) cannot send the proof, because its
    environment may lack the middleware rollout/vllm/http_gate.py.
    """
    return settings.kind != "vllm" or not settings.command


def find_address(run: Path, name: str, kind: str, *, is_gated: bool = True) -> str:
    """Return the published address of a service if the service is running, else ''.

    If `is_gated` is True, the server must first prove that it knows the token. Raises KeyRefused if
    the server rejects the token.
    """
    try:
        published = _PublishedAddress.model_validate_json(read_bytes(address_file(run, name), at_most=MAX_ADDRESS_BYTES))
    except (OSError, ValueError):
        return ""
    is_it = is_service_running(published.url, kind, nonce=published.nonce, token=token_file(run, name), is_gated=is_gated)
    return published.url if is_it else ""


def is_service_running(url: str, kind: str, *, nonce: str, token: Path, is_gated: bool = True) -> bool:
    """Return True if the service with this nonce responds at the address.

    The request contains the service's own token, but none of the user's keys. The port and the
    nonce are visible to every user who can list processes. If `is_gated` is True, the server must
    therefore first prove that it knows the token (see `has_proven_token`). Without this proof, a
    server of another user that has taken over the port could be mistaken for the service.

    Raises:
        KeyRefused: The server at the address rejects the token.
    """
    try:
        own = read_token(token)
        if is_gated and not has_proven_token(url, token=own):
            return False
        answer = send_request(
            "GET", url + SERVICE_KINDS[kind].health_path, timeout_s=HEALTH_TIMEOUT_S, max_bytes=MAX_HEALTH_BYTES, token=own
        )
        if answer.status in DENIED_STATUSES:
            raise KeyRefused(f"{url} responds with {answer.status}, {to_one_line(answer.text)}: {SERVICE_KINDS[kind].key_remedy}")
        return nonce in SERVICE_KINDS[kind].read_names(answer.content)
    except (NoResponse, ValueError):  # ValueError: no token, or pydantic's ValidationError
        return False


def has_proven_token(url: str, *, token: str) -> bool:
    """Return True if the server proves that it knows the token; the token is not sent.

    The proof is described in sandbox/access.py.
    """
    challenge = secrets.token_hex(16)
    try:
        answer = send_request(
            "GET", urljoin(url, "/health"), timeout_s=HEALTH_TIMEOUT_S, max_bytes=MAX_HEALTH_BYTES, headers={CHALLENGE_HEADER: challenge}
        )
    except NoResponse:
        return False
    port = urlsplit(url).port
    if port is None:  # the proof contains the port, so a URL without a port cannot be proven
        return False
    expected = compute_proof(token, challenge, port=port)
    return hmac.compare_digest(answer.headers.get(PROOF_HEADER, "").encode(), expected.encode())
