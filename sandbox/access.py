"""Checks the Host, origin, token and content type of a request before its body is read.

request_gate.py applies the checks in this project's servers. megatron_rl/rollout/vllm/http_gate.py
applies them in a run's vLLM servers. Web pages in a browser on this machine can reach loopback
ports. Requests from such pages are rejected for the following reasons:

- The browser adds an Origin or Sec-Fetch-Site header to the page's requests, and the page does not
  know the token.
- A page of another origin can send application/json only after a CORS preflight, which the servers
  do not grant.
- After DNS rebinding, the browser treats the server as part of the page's origin, but the Host
  header still names the page's host.

Before a client sends its token, the server can prove that it knows the token: it responds to a
challenge with a keyed digest of the challenge and the server's port (`compute_proof`). If the
digest did not include the port, a process that took over the server's port could relay the
challenge to a server with the same token on another port.
"""

import hashlib
import hmac
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

from starlette.types import Scope

CHALLENGE_HEADER, PROOF_HEADER = "X-Challenge", "X-Proof"
_CHALLENGE = re.compile(rb"[0-9a-f]{32,128}")
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\[\]:/@\s]+))(?::[0-9]{1,5})?")
_BODILESS = ("GET", "HEAD", "DELETE", "OPTIONS")


@dataclass(frozen=True, slots=True)
class RequestRejection:
    """HTTP status, reason and additional headers of the response to a rejected request."""

    status_code: int
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)


class AccessRules:
    """Accepts or rejects requests based on their headers."""

    def __init__(self, *, token: str, hosts: Iterable[str] = ()) -> None:
        """Create the rules.

        If `token` is empty, requests need no token. `hosts` are accepted names of the server in
        addition to localhost and the name of this machine.
        """
        self._token, self._hosts = token, {name.casefold() for name in (*local_host_names(), *hosts)}

    def check_request(self, scope: Scope) -> RequestRejection | None:
        """Return None if the request is acceptable, else the rejection to send."""
        headers = dict(scope["headers"])
        if not self._is_own_host([value for name, value in scope["headers"] if name == b"host"]):
            return RequestRejection(
                421, "the Host header names another server; use an IP address in the URL, or start the server with --host NAME"
            )
        if b"origin" in headers or headers.get(b"sec-fetch-site", b"none") != b"none":
            return RequestRejection(403, "requests from web pages are rejected")
        if self._token and not hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self._token}".encode()):
            more = {"WWW-Authenticate": "Bearer", **self._proof_headers(scope, headers)}
            return RequestRejection(401, "this server requires a token: Authorization: Bearer ...", more)
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        if (has_body or scope["method"] not in _BODILESS) and _media_type(headers) != b"application/json":
            return RequestRejection(415, "the content type of a request must be application/json")
        return None

    def _is_own_host(self, given: list[bytes]) -> bool:
        match = _HOST.fullmatch(given[0].decode("latin-1").casefold()) if len(given) == 1 else None
        return match is not None and (match["name"] in self._hosts or _is_address(match["v6"] or match["name"]))

    def _proof_headers(self, scope: Scope, headers: Mapping[bytes, bytes]) -> dict[str, str]:
        challenge = headers.get(CHALLENGE_HEADER.lower().encode(), b"")
        if not _CHALLENGE.fullmatch(challenge) or not scope.get("server"):
            return {}
        return {PROOF_HEADER: compute_proof(self._token, challenge.decode(), port=scope["server"][1])}


def compute_proof(token: str, challenge: str, *, port: int) -> str:
    """Return the proof that a server on `port` knows the token.

    `challenge` is a string of 32 to 128 hexadecimal digits.
    """
    return hmac.new(token.encode(), f"{challenge} {port}".encode(), hashlib.sha256).hexdigest()


def local_host_names() -> set[str]:
    """Return "localhost" and this machine's host name, both with and without the domain."""
    name = socket.gethostname()
    return {"localhost", name, name.partition(".")[0]}


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _media_type(headers: Mapping[bytes, bytes]) -> bytes:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
