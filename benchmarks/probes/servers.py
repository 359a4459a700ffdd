"""Probes of servers: requests from web pages, clients without the token, and slow clients.

The control is the same server without the defense.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.probes import loads
from benchmarks.probes.probe import Probe
from benchmarks.probes.sites import SMALL_LIMITS, TOKEN, EngineServer, ModelServer, SandboxServer, Viewer

Sent = tuple[tuple[str, str], ...]
JSON, HERE = ("Content-Type", "application/json"), ("Host", "127.0.0.1")


def opens_a_box(*forms: Sent, body: bytes = b"{}", version: str = "1.1") -> Callable[[Any, Path], str]:
    """Return an attack that tries to open a box with each of these sets of headers."""

    def attack(server: Any, folder: Path) -> str:
        with server(folder) as site:
            codes = [site.ask("POST", "/boxes", *form, body=body, version=version)[0] for form in forms]
        return f"{codes.count(201)} of {len(forms)} boxes are opened" if 201 in codes else ""

    return attack


def hosts(*names: str) -> tuple[Sent, ...]:
    """Return one set of headers for each of these host names."""
    return tuple((("Host", name), JSON) for name in names)


def typed(*types: str) -> tuple[Sent, ...]:
    """Return one set of headers for each of these content types."""
    return tuple((HERE, ("Content-Type", each)) for each in types)


def says(*words: str) -> tuple[Sent, ...]:
    """Return one set of headers for each of these Authorization values."""
    return tuple((HERE, JSON, ("Authorization", each)) for each in words)


def read_by_a_page(server: Any, folder: Path) -> str:
    """Return a success message if a foreign web page can read /health, else "".

    The page is from another subdomain or port, and its GET request has no Origin header.
    """
    with server(folder) as site:
        codes = [site.ask("GET", "/health", HERE, ("Sec-Fetch-Site", each))[0] for each in ("same-site", "cross-site", "same-origin")]
    return "a page reads /health" if 200 in codes else ""


def scored_for_a_page(server: Any, folder: Path) -> str:
    """Return a success message if a DNS-rebound page can query the model, else ""."""
    with server(folder) as site:
        code, _ = site.ask(
            "POST", "/score", ("Host", "listener.evil.example"), ("Origin", "http://listener.evil.example"), JSON, body=b"{}"
        )
    return "a rebound name queries the model" if code == 200 else ""


def routes_are_told_apart(server: Any, folder: Path) -> str:
    """Return a success message if status codes reveal which routes exist, else "".

    The client does not have the token.
    """
    with server(folder) as site:
        answers = {
            site.ask(verb, path, HERE)[0] for verb in ("GET", "OPTIONS", "HEAD") for path in ("/boxes", "/none", "/health", "/metrics")
        }
    return f"statuses {sorted(answers)} reveal which routes exist" if len(answers) > 1 else ""


def methods_are_told(server: Any, folder: Path) -> str:
    """Return a success message if responses list the allowed methods of a route, else ""."""
    with server(folder) as site:
        answers = [site.ask(verb, "/boxes", HERE)[1].lower() for verb in ("OPTIONS", "TRACE", "PUT", "QUERY", "post")]
    return "the methods of a route are revealed" if any(b"\r\nallow:" in answer for answer in answers) else ""


def preflight_is_answered(server: Any, folder: Path) -> str:
    """Return a success message if a CORS preflight request is allowed, else ""."""
    asked = (("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "content-type"))
    with server(folder) as site:
        _, answer = site.ask("OPTIONS", "/pause", HERE, ("Origin", "http://evil.example"), *asked)
    return "a page may send application/json" if b"access-control-allow-origin" in answer.lower() else ""


def paused_by_a_key_elsewhere(server: Any, folder: Path) -> str:
    """Return a success message if the token is accepted outside the Authorization header, else "".

    Tokens in a query string, a cookie or another header may be written to logs or sent
    automatically by browsers.
    """
    places = (("X-Api-Key", TOKEN), ("Cookie", f"token={TOKEN}"), ("Proxy-Authorization", f"Bearer {TOKEN}"), ("Api-Key", TOKEN))
    with server(folder) as site:
        codes = [site.ask("POST", f"/pause?token={TOKEN}", HERE, JSON, place, body=b"{}")[0] for place in places]
    return "the engine is paused" if 200 in codes else ""


def talks_by_websocket(server: Any, folder: Path) -> str:
    """Return a success message if a connection is upgraded to a WebSocket, else ""."""
    key = (("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="), ("Authorization", f"Bearer {TOKEN}"))
    with server(folder) as site, site.connect() as line:
        head = "".join(
            f"{name}: {value}\r\n" for name, value in (HERE, ("Connection", "keep-alive, Upgrade"), ("Upgrade", "WebSocket"), *key)
        )
        line.sendall(f"GET /v1/realtime HTTP/1.1\r\n{head}\r\n".encode())
        return "the connection is upgraded" if line.recv(1 << 12).startswith(b"HTTP/1.1 101") else ""


def calls_another_method(server: Any, folder: Path) -> str:
    """Return a success message if a forbidden worker method is called, else "".

    The requests contain the token. Their paths are spelled in different ways, and two parsers may
    interpret their bodies differently.
    """
    paths = ("/collective_rpc", "//collective_rpc", "/./collective_rpc", "/%63ollective_rpc", "/collective_rpc?x=/", "/collective_rpc;x")
    plain = json.dumps({"method": "save_sharded_state", "args": [str(folder / "written")]})
    other = (
        '{"method": "rl_fingerprint", "method": "save_sharded_state"}',
        '{"method": "rl_fingerprint", "args": []}',
        '{"\\u006dethod": "sleep"}',
    )
    bodies = [plain.encode(), plain.encode("utf-16"), plain.encode("utf-8-sig"), *(each.encode() for each in other), b'{"method": NaN}']
    know = ("Authorization", f"Bearer {TOKEN}")
    with server(folder) as site:
        codes = [site.ask("POST", path, HERE, JSON, know, body=body)[0] for path in paths for body in bodies]
    if (folder / "written").exists():
        return "the worker wrote files"
    return f"{codes.count(200)} calls reach the worker" if 200 in codes else ""


def seen_by_a_rebound_name(server: Any, folder: Path) -> str:
    """Return a success message if the viewer accepts a DNS-rebound host name, else ""."""
    names = ("localhost.evil.example", "127.0.0.1.evil.example:8008", "LOCALHOST.", "evil.example#localhost", "127.0.0.2")
    with server(folder) as site:
        codes = [site.ask("GET", "/api/runs", ("Host", name))[0] for name in names]
    return "the runs are listed" if 200 in codes else ""


def shown_in_a_page(server: Any, folder: Path) -> str:
    """Return a success message if an <img> on another site can load a viewer image, else "".

    If so, the site could find out whether the image exists, and the size of the image.
    """
    with server(folder) as site:
        mode = (("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "no-cors"), ("Sec-Fetch-Dest", "image"))
        codes = [site.ask("GET", path, HERE, *mode)[0] for path in ("/picture/run/a.png", "/api/runs")]
    return "a foreign page loads the run's image" if 200 in codes else ""


def framed_in_a_page(server: Any, folder: Path) -> str:
    """Return a success message if a page of another site can frame the viewer, else ""."""
    with server(folder) as site:
        code, answer = site.ask(
            "GET", "/", HERE, ("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "iframe")
        )
    return "a foreign page frames the viewer" if code == 200 and b"frame-ancestors 'none'" not in answer else ""


BOX, OPEN_BOX = SandboxServer(), SandboxServer(is_gated=False)
KEYED = replace(BOX, token=TOKEN)
HASTY, PATIENT = replace(BOX, line=loads.SHORT), replace(BOX, line=None)
SMALL, OPEN_SMALL = replace(BOX, limits=SMALL_LIMITS), replace(OPEN_BOX, limits=SMALL_LIMITS)
HEAD = b"POST /boxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NEARLY = (
    f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Bearer {TOKEN.upper()}", f"bearer {TOKEN}", f"Bearer  {TOKEN}", f"Bearer\t{TOKEN}",
    f"Bearer {TOKEN},Bearer x", f"Bearer {TOKEN}\u00a0", "Bearer ", "Bearer null", "Bearer undefined", f"Token {TOKEN}", f"Digest {TOKEN}",
)  # fmt: skip
REBOUND = (
    "LOCALHOST.EVIL.EXAMPLE",
    "evil.example.",
    "localhost.:80.",
    "127.0.0.1.nip.example",
    "0x7f000001.evil",
    "2130706433",
    "127.1.evil",
)
ODD = ("127.0.0.1@evil.example", "evil.example@", "localhost#evil.example", "localhost?evil.example", "localhost/evil", "a,localhost")
SIX = ("[::1].evil.example", "[::1]evil", "[::ffff:127.0.0.1%25evil.example]", "[localhost]", "[evil]:80", "::1.evil.example")
FORWARDED = (("X-Forwarded-Host", "localhost"), ("Forwarded", "host=localhost"), ("X-Host", "localhost"), ("X-Original-Host", "localhost"))
NEAR = tuple((HERE, JSON, ("Origin", each)) for each in ("http://127.0.0.1:3000", "http://localhost", "https://127.0.0.1"))
NULL = tuple((HERE, JSON, ("Origin", each)) for each in ("null", "file://", "chrome-extension://abc", ""))
TEXTS = (
    "text/plain; application/json",
    "text/plain, application/json",
    "text/plain;charset=application/json",
    "application/json, text/plain",
)
FORMS = ("multipart/form-data; boundary=application/json", "application/x-www-form-urlencoded; a=application/json", "multipart/json")
REPORTS = ("application/csp-report", "application/reports+json", "application/ld+json", "application/jsonp", "application/json-seq")

ENGINE, OPEN_ENGINE = EngineServer(), EngineServer(is_gated=False)
VIEWER, OPEN_VIEWER = Viewer(), Viewer(is_guarded=False)
SERVERS = tuple(
    Probe("servers", name, attack, defended, control)
    for name, attack, defended, control in (
        ("host: rebound names that look like an address or localhost", opens_a_box(*hosts(*REBOUND)), BOX, OPEN_BOX),
        ("host: names with users, fragments, paths or lists", opens_a_box(*hosts(*ODD)), BOX, OPEN_BOX),
        ("host: names in the form of IPv6 addresses", opens_a_box(*hosts(*SIX)), BOX, OPEN_BOX),
        ("host: the correct name in X-Forwarded-Host", opens_a_box((("Host", "evil.example"), *FORWARDED, JSON)), BOX, OPEN_BOX),
        ("host: missing, with HTTP/1.0", opens_a_box((JSON,), version="1.0"), BOX, OPEN_BOX),
        ("page: from another port of this machine", opens_a_box(*NEAR), BOX, OPEN_BOX),
        ("page: from a frame without an origin, a file or an extension", opens_a_box(*NULL), BOX, OPEN_BOX),
        ("page: from another subdomain, reads /health", read_by_a_page, BOX, OPEN_BOX),
        ("page: from a rebound name, queries the listener", scored_for_a_page, ModelServer(), ModelServer(is_gated=False)),
        ("type: missing, as for a Blob", opens_a_box((HERE,)), BOX, OPEN_BOX),
        ("type: text that mentions JSON", opens_a_box(*typed(*TEXTS)), BOX, OPEN_BOX),
        ("type: forms that mention JSON", opens_a_box(*typed(*FORMS)), BOX, OPEN_BOX),
        ("type: reports and other JSON types", opens_a_box(*typed(*REPORTS)), BOX, OPEN_BOX),
        ("token: thirteen that are almost correct", opens_a_box(*says(*NEARLY)), KEYED, OPEN_BOX),
        ("token: missing, which routes exist", routes_are_told_apart, KEYED, OPEN_BOX),
        ("token: missing, which methods a route has", methods_are_told, KEYED, OPEN_BOX),
        ("engine: a page's preflight", preflight_is_answered, ENGINE, OPEN_ENGINE),
        ("engine: the token in the query, a cookie or X-Api-Key", paused_by_a_key_elsewhere, ENGINE, OPEN_ENGINE),
        ("engine: a websocket, with the token", talks_by_websocket, ENGINE, OPEN_ENGINE),
        ("engine: other worker methods, 42 variants", calls_another_method, ENGINE, OPEN_ENGINE),
        ("slow: a header, byte by byte", loads.slow(HEAD + b"X-A: ", b"a"), HASTY, PATIENT),
        ("slow: a body, byte by byte", loads.slow(HEAD + b"Content-Length: 1000\r\n\r\n", b" "), HASTY, PATIENT),
        ("slow: more silent connections than allowed", loads.holds_many_lines, HASTY, PATIENT),
        ("slow: responses that are not read", loads.reads_no_answer, HASTY, PATIENT),
        ("large: a chunked body without a length", loads.sends_without_end, SMALL, OPEN_SMALL),
        ("large: sixteen concurrent bodies without their last byte", loads.holds_large_bodies, SMALL, OPEN_SMALL),
        ("large: two million file names", loads.sends_many_names, BOX, OPEN_BOX),
        ("log: a hundred invalid requests", loads.fills_the_log, HASTY, PATIENT),
        ("viewer: rebound names", seen_by_a_rebound_name, VIEWER, OPEN_VIEWER),
        ("viewer: its images in a foreign page", shown_in_a_page, VIEWER, OPEN_VIEWER),
        ("viewer: framed by a foreign page", framed_in_a_page, VIEWER, OPEN_VIEWER),
        ("viewer: a header, byte by byte", loads.slow(b"GET / HTTP/1.1\r\nX-A: ", b"a"), Viewer(line=loads.SHORT), Viewer(line=None)),
    )
)
