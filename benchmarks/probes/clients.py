"""Probes of this project's clients: responses from untrusted servers.

The control is httpx, urllib, or this project's client without the check that a server knows the
token.
"""

import asyncio
import json
import os
import re
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from benchmarks.probes.hostile import Answer, Trap, brotlied, deflated, drips, gzipped_twice, packed, says, trap
from benchmarks.probes.probe import Probe
from benchmarks.probes.sites import TOKEN, SandboxServer
from megatron_rl.rollout.vllm.server_api import VllmServer
from megatron_rl.services import address
from megatron_rl_sandbox import access
from megatron_rl_sandbox.access import CHALLENGE_HEADER, PROOF_HEADER, compute_proof
from megatron_rl_sandbox.bounded_http import BoundedClient, send_request
from megatron_rl_sandbox.records import BoxLimits
from megatron_rl_sandbox.sandbox_client import SandboxClient
from megatron_rl_sandbox.token import bearer_header

LIMIT_S = 1.5
HEALTH = {"limits": asdict(BoxLimits())}
Ask = Callable[[str], object]


def bounded(url: str) -> object:
    """Request a URL with this project's client."""
    return send_request("GET", url, timeout_s=LIMIT_S, max_bytes=1 << 16, token=TOKEN).content


def plain(url: str) -> object:
    """Request a URL with httpx."""
    return httpx.get(url, timeout=LIMIT_S, headers=bearer_header(TOKEN)).content


def urllibs(url: str) -> object:
    """Request a URL with urllib."""
    return urllib.request.urlopen(urllib.request.Request(url, headers=bearer_header(TOKEN)), timeout=LIMIT_S).read()


def bounded_twice(url: str) -> None:
    """Request a URL twice with the same BoundedClient of this project."""

    async def main() -> None:
        async with BoundedClient() as client:
            for _ in range(2):
                await client.request("GET", url, timeout_s=LIMIT_S, max_bytes=1 << 16)

    asyncio.run(main())


def plain_twice(url: str) -> None:
    """Request a URL twice with the same httpx client."""
    with httpx.Client(timeout=LIMIT_S) as client:
        for _ in range(2):
            client.get(url)


def num_workers(url: str) -> object:
    """Request an engine's number of workers with this project's client."""
    return VllmServer(url, token=TOKEN, max_timeout_s=LIMIT_S).num_workers()


def num_workers_unchecked(url: str) -> object:
    """Request an engine's number of workers and do not validate the response."""
    answer = httpx.get(url, timeout=LIMIT_S, headers=bearer_header(TOKEN))
    if not answer.is_success:
        raise ValueError(answer.text)
    return int(answer.json()["world_size"])


def starts_a_sandbox(url: str) -> object:
    """Start a sandbox client and return the call timeout that the server reports."""

    async def main() -> object:
        async with SandboxClient(url) as client:
            return client.limits.call_timeout_s

    return asyncio.run(main())


def starts_unchecked(url: str) -> object:
    """Return the call timeout that a sandbox server reports, without validation."""
    return httpx.get(f"{url}/health", timeout=LIMIT_S).json()["limits"]["call_timeout_s"]


def opens_a_box(url: str) -> None:
    """Open a sandbox box with this project's client."""

    async def main() -> None:
        async with SandboxClient(url) as client:
            await client.open(wait_s=1.0)

    asyncio.run(main())


def opens_as_told(url: str) -> None:
    """Request a box with httpx, then wait for the response's Retry-After time, at most 60 s."""
    answer = httpx.post(f"{url}/boxes", timeout=LIMIT_S)
    time.sleep(min(60.0, float(answer.headers["Retry-After"])))


def against(answer: Answer) -> Callable[[Ask, Path], str]:
    """Return an attack that sends this response to the client.

    The attack never returns a success message. The attack succeeds if the client exceeds the
    probe's limits on time or memory, or fails with an unexpected exception.
    """

    def attack(ask: Ask, folder: Path) -> str:
        with trap(answer) as found:
            ask(found.url)
        return ""

    return attack


def compressed(encoding: str, pack: Callable[[int], bytes]) -> Callable[[Ask, Path], str]:
    """Return an attack that sends a gigabyte of zeros, which it compresses when it starts."""
    return lambda ask, folder: against(packed(encoding, pack))(ask, folder)


def believed(answer: Answer) -> Callable[[Ask, Path], str]:
    """Return an attack that succeeds if the client accepts this response."""

    def attack(ask: Ask, folder: Path) -> str:
        with trap(answer) as found:
            return f"{ask(found.url)} is accepted"

    return attack


def repeats_the_token(ask: Ask, folder: Path) -> str:
    """Return a success message if the token appears in an error message, else ""."""
    with trap(says("500 Oops", f"no such word: {TOKEN}".encode())) as found:
        try:
            ask(found.url)
        except Exception as error:
            return "the token is in an error message" if TOKEN in str(error) else ""
    return ""


def redirects(ask: Ask, folder: Path) -> str:
    """Return a success message if the token is sent to the target of a redirect, else ""."""
    with trap(says("200 OK")) as other, trap(says(f"307 Temporary Redirect\r\nLocation: {other.url}/")) as found:
        ask(found.url)
    return "the token is sent to another server" if other.has_heard(TOKEN) else ""


def is_the_proxy(ask: Ask, folder: Path) -> str:
    """Return a success message if a proxy receives the token, else "".

    The proxy is set by environment variables, which an attacker with access to the user's shell
    could also set.
    """
    with trap(says("200 OK")) as proxy, patch.dict(os.environ, {"http_proxy": proxy.url, "all_proxy": proxy.url, "no_proxy": ""}):
        try:
            ask("http://127.0.0.1:1/")
        except (ValueError, OSError, httpx.HTTPError) as error:
            return "" if not proxy.heard else str(error)
    return "a proxy receives the token" if proxy.has_heard(TOKEN) else ""


def sets_cookies(ask: Ask, folder: Path) -> str:
    """Return a success message if the client sends cookies back, else ""."""
    cookies = "\r\n".join(f"Set-Cookie: c{number}={'x' * 1000}; Path=/" for number in range(40))
    with trap(says(f"200 OK\r\n{cookies}")) as found:
        ask(found.url)
    return "40 KB of cookies are sent back" if found.has_heard("c1=x") or found.has_heard("ookie:") else ""


def told_the_token(answer: Answer, *, kind: str = "sandbox") -> Callable[[Any, Path], str]:
    """Return an attack by a malicious server on the port of one of the run's servers.

    The attack succeeds if the malicious server receives the token or is accepted as the run's
    server.
    """

    def attack(weakened: Any, folder: Path) -> str:
        file = folder / "token"
        file.write_text(TOKEN)
        with weakened(), patch.object(address, "HEALTH_TIMEOUT_S", 20.0), trap(answer) as found:
            is_taken = address.is_service_running(found.url, kind, nonce="the-nonce", token=file)
        if found.has_heard(f"Bearer {TOKEN}"):
            return "it receives the token"
        return "it is accepted as the run's server" if is_taken else ""

    return attack


def _proves(made: Callable[[Trap, str], str]) -> Answer:
    """Return a response with the run's nonce and, if the request contains a challenge, a proof.

    An attacker may know the nonce, because it is visible in the process list.
    """

    def answer(found: Trap, line: Any, asked: bytes) -> None:
        challenge = re.search(rf"(?i){CHALLENGE_HEADER}: (\S+)", asked.decode("latin-1"))
        proof = made(found, challenge[1]) if challenge else ""
        body = json.dumps({"name": "the-nonce", "data": [{"id": "the-nonce"}]}).encode()
        says(f"200 OK\r\n{PROOF_HEADER}: {proof}", body)(found, line, asked)

    return answer


def _relayed(found: Trap, challenge: str) -> str:
    with SandboxServer(token=TOKEN)(Path("/")) as site:
        return httpx.get(f"http://127.0.0.1:{site.port}/health", headers={CHALLENGE_HEADER: challenge}).headers[PROOF_HEADER]


def as_it_is() -> Any:
    """Return a context manager that does nothing, so the client keeps its defense."""
    return patch.dict(os.environ)


def without_proof() -> Any:
    """Return a context manager inside which servers need not prove that they know the token."""
    return patch.object(address, "has_proven_token", lambda url, token: True)


def with_one_challenge() -> Any:
    """Return a context manager inside which every challenge is the same."""
    return patch.object(address.secrets, "token_hex", lambda num: "0" * 32)


class without_a_port:
    """Context manager inside which a proof covers only the challenge, not the server's port."""

    def __enter__(self) -> None:
        for module in (access, address):
            patch.object(module, "compute_proof", lambda token, challenge, port: compute_proof(token, challenge, port=0)).start()

    def __exit__(self, *error: object) -> None:
        patch.stopall()


FORGED = _proves(lambda found, challenge: challenge[::-1] * 2)
REPLAYED = _proves(lambda found, challenge: compute_proof(TOKEN, "0" * 32, port=found.port))
CHUNKED = "Transfer-Encoding: chunked\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
DEEP = says("200 OK", b'{"world_size": 1, "a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}")
NAN = says("200 OK", b'{"limits": {"call_timeout_s": NaN, "open_timeout_s": 1e999, "images": -1}}')
FULL = says("429 Full\r\nRetry-After: 1000000000", json.dumps({"detail": "full", **HEALTH}).encode())


def full(found: Trap, line: Any, asked: bytes) -> None:
    """Respond to /health with valid limits, and to other requests with a very long Retry-After."""
    says("200 OK", json.dumps(HEALTH).encode())(found, line, asked) if b"/health" in asked else FULL(found, line, asked)


CHECKED, UNCHECKED = num_workers, num_workers_unchecked
TERABYTE = drips("Content-Length: 1099511627776\r\n\r\n", b"a" * (1 << 20), pause_s=0)
EXTENDED = drips(CHUNKED, b"10000;e=x\r\n" + b"a" * 65536 + b"\r\n", pause_s=0)
TITLE = says("500 Oops", b"\x1b]0;owned\x07\x1b[2J")
CLIENTS = tuple(
    Probe("clients", name, attack, defended, control)
    for name, attack, defended, control in (
        ("slow: one header value, byte by byte", against(drips("X-A: ", b"a")), bounded, plain),
        ("slow: chunks of one byte", against(drips(CHUNKED, b"1;a=b\r\na\r\n")), bounded, plain),
        ("slow: trailers after the body", against(drips(f"{CHUNKED}0\r\n", b"X: 1\r\n")), bounded, plain),
        ("slow: 103 Early Hints, without a response", against(drips("\r\n", HINTS)), bounded, plain),
        ("endless: a Content-Length of one terabyte", against(TERABYTE), bounded, plain),
        ("endless: chunks with extensions", against(EXTENDED), bounded, plain),
        ("compressed: a gigabyte, deflate", compressed("deflate", deflated), bounded, plain),
        ("compressed: a gigabyte, gzip twice", compressed("gzip, gzip", gzipped_twice), bounded, plain),
        ("compressed: a gigabyte, brotli", compressed("br", brotlied), bounded, plain),
        ("token: redirect to another server", redirects, bounded, urllibs),
        ("token: proxy set by environment variables", is_the_proxy, bounded, plain),
        ("token: repeated in an error message", repeats_the_token, CHECKED, UNCHECKED),
        ("cookies: 40 KB", sets_cookies, bounded_twice, plain_twice),
        ("JSON: 200,000 nested lists", against(DEEP), CHECKED, UNCHECKED),
        ("JSON: infinitely many workers", against(says("200 OK", b'{"world_size": 1e999}')), CHECKED, UNCHECKED),
        ("JSON: a sandbox's limits are not numbers", believed(NAN), starts_a_sandbox, starts_unchecked),
        ("terminal: control characters in an error message", against(TITLE), CHECKED, UNCHECKED),
        ("wait: Retry-After of 30 years", against(full), opens_a_box, opens_as_told),
        ("proof: missing or forged", told_the_token(FORGED), as_it_is, without_proof),
        ("proof: replayed", told_the_token(REPLAYED), as_it_is, with_one_challenge),
        ("proof: relayed from another server with the same token", told_the_token(_proves(_relayed)), as_it_is, without_a_port),
        ("proof: a judge's port, by an attacker who knows its nonce", told_the_token(FORGED, kind="vllm"), as_it_is, without_proof),
    )
)
