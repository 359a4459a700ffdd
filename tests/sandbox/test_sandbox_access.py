"""Tests the headers that let a request in: headers of web pages, host names of other servers, and
the proof by which a server shows that it knows the token."""

import hashlib
import hmac
import socket

import httpx
import pytest

from megatron_rl_sandbox.access import CHALLENGE_HEADER, PROOF_HEADER, AccessRules
from megatron_rl_sandbox.http import NO_DOC_PAGES
from megatron_rl_sandbox.server import create_app
from tests.support.fake_sandbox_server import FakePool, read_answer, serve_sandbox

TOKEN = "a-word-of-thirty-two-characters!"
HERE = socket.gethostname()
JSON = ("Content-Type", "application/json")


def refused(*headers: tuple[str, str], method: str = "POST", token: str = "", hosts: tuple[str, ...] = ()) -> int:
    """Return the status code of the refusal, or 0 if the request is admitted."""
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "method": method, "headers": raw, "server": ("127.0.0.1", 8000)}
    refusal = AccessRules(token=token, hosts=hosts).check_request(scope)
    return refusal.status_code if refusal else 0


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.1.2.3:80", "localhost:1", "LOCALHOST", HERE])
def test_addresses_and_own_names_are_hosts(host: str) -> None:
    """A Host header with an IP address, localhost or the machine's own name is accepted."""
    assert refused(("Host", host), JSON) == 0


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "evil.example#127.0.0.1", "", ":8000",
        "[::1].evil.example", "[evil.example]", "[::1", "localhost.evil.example", "127.0.0.1:8000:1", "127.0.0.1 ", "localhost:x",
        f"{HERE}.evil.example", "node2", "\xff",
    ],
)  # fmt: skip
def test_other_names_are_no_hosts(host: str) -> None:
    """Any other Host header is refused with 421, before the token is checked."""
    assert refused(("Host", host), JSON) == 421
    assert refused(("Host", host), JSON, token=TOKEN) == 421, "before the token: nothing is learned about it"


def test_there_is_one_host_and_a_name_can_be_given() -> None:
    """A request must have exactly one Host header. Further names can be allowed by the option
    `hosts`."""
    assert refused(JSON) == 421 and refused(("Host", "127.0.0.1"), ("Host", "evil.example"), JSON) == 421
    assert refused(("Host", "Node2:8000"), JSON, hosts=("node2",)) == 0 and refused(("Host", ""), JSON, hosts=("",)) == 421


@pytest.mark.parametrize(
    ("method", "headers", "code"),
    [
        ("POST", [("Content-Type", "text/plain;charset=UTF-8")], 415), ("POST", [], 415), ("POST", [("Content-Length", "0")], 415),
        ("POST", [("Content-Type", "application/x-www-form-urlencoded")], 415), ("POST", [("Content-Type", "application/jsonp")], 415),
        ("POST", [("Content-Type", "multipart/form-data; boundary=application/json")], 415),
        ("GET", [("Content-Length", "2"), ("Content-Type", "text/plain")], 415), ("DELETE", [("Transfer-Encoding", "chunked")], 415),
        ("POST", [JSON, ("Origin", "http://evil.example")], 403), ("GET", [("Origin", "null")], 403),
        ("GET", [("Sec-Fetch-Site", "cross-site")], 403), ("GET", [("Sec-Fetch-Site", "same-origin")], 403),
        ("POST", [("Content-Type", "Application/JSON; charset=utf-8")], 0), ("GET", [], 0), ("DELETE", [], 0),
        ("GET", [("Sec-Fetch-Site", "none")], 0),
    ],
)  # fmt: skip
def test_what_a_web_page_can_send_is_refused(method: str, headers: list[tuple[str, str]], code: int) -> None:
    """Requests that a web page can send are refused with 415 or 403. A page may POST these content
    types to any port without a preflight request (Fetch standard, CORS-safelisted request headers).
    """
    assert refused(("Host", "127.0.0.1"), *headers, method=method) == code


def test_a_page_of_a_stranger_does_nothing_at_a_real_server() -> None:
    """Finding 6, over a socket: a request with the headers of a foreign web page is refused with
    421, 403 or 415 and opens no box. The same request without these headers opens one."""
    page = {"Host": "evil.example", "Origin": "http://evil.example", "Content-Type": "text/plain"}
    with serve_sandbox() as server:
        for left_out, code in (((), 421), (("Host",), 403), (("Host", "Origin"), 415)):
            headers = {name: value for name, value in page.items() if name not in left_out}
            answer = httpx.post(f"{server.url}/boxes", content=b"{}", headers=headers)
            assert (answer.status_code, server.pool.num_open) == (code, 0)
        assert httpx.post(f"{server.url}/boxes", json={}).status_code == 201 and server.pool.num_open == 1
        assert [httpx.get(f"{server.url}{page}").status_code for page in ("/docs", "/redoc", "/openapi.json")] == [404] * 3
    assert create_app(FakePool()).docs_url is None and NO_DOC_PAGES["openapi_url"] is None


def test_a_server_proves_that_it_knows_the_token() -> None:
    """A server proves that it knows the token without receiving it. The oracle is an HMAC-SHA256 of
    the challenge and the server's port, computed here with the standard library."""
    challenge = "0123456789abcdef" * 2
    with serve_sandbox(token=TOKEN) as server:
        answer = httpx.get(f"{server.url}/health", headers={CHALLENGE_HEADER: challenge})
        expected = hmac.new(TOKEN.encode(), f"{challenge} {server.port}".encode(), hashlib.sha256).hexdigest()
        assert (answer.status_code, answer.headers[PROOF_HEADER]) == (401, expected)
        for odd in ("", "0", "x" * 32, challenge * 9, challenge + "\xff"):
            assert PROOF_HEADER not in httpx.get(f"{server.url}/health", headers={CHALLENGE_HEADER: odd.encode("latin-1")}).headers
    with serve_sandbox() as server:
        assert PROOF_HEADER not in httpx.get(f"{server.url}/health", headers={CHALLENGE_HEADER: challenge}).headers


def test_bytes_that_are_no_request_are_answered_once() -> None:
    """A request with a refused header and a malformed body gets one response, a 400. A second
    response, for the header, made uvicorn write a traceback to the log."""
    head = b"POST /boxes HTTP/1.1\r\nHost: evil.example\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serve_sandbox() as server:
        for _ in range(5):
            with server.connect() as line:
                line.sendall(head + b"no length\r\n")
                assert read_answer(line).startswith(b"HTTP/1.1 400")
        assert httpx.get(f"{server.url}/health").status_code == 200 and server.log == []
