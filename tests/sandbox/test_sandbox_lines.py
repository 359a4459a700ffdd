"""Tests the effect of clients that stall, flood or do not read on other clients. Each attack also
runs without the protection that stops it."""

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from http.client import HTTPConnection
from socket import socket

import httpx
import pytest

from megatron_rl_sandbox.connections import ConnectionRegistry, LogRateLimiter
from tests.support.fake_sandbox_server import RunningServer, build_request, read_answer, serve_sandbox

QUICK = ConnectionRegistry(header_timeout_s=0.5, body_timeout_s=0.5, response_timeout_s=0.5)
OPEN = ConnectionRegistry(
    max_connections=10_000, header_timeout_s=math.inf, body_timeout_s=math.inf, response_timeout_s=math.inf, max_unread_bytes=1 << 62
)
"""No limits, as in plain uvicorn."""
FETCHED = 8 << 20


def fresh(line: ConnectionRegistry, **change: float) -> ConnectionRegistry:
    plain = {name: value for name, value in asdict(replace(line, awaiting_request={}, awaiting_reader={})).items()}
    del plain["awaiting_request"], plain["awaiting_reader"]
    return ConnectionRegistry(**(plain | change))


def is_cut(line: socket, *, within_s: float) -> bool:
    """Return True if the server closes the connection without a response."""
    line.settimeout(within_s)
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_an_honest_request_is_answered_under_the_tightest_limits() -> None:
    with serve_sandbox(connections=fresh(QUICK)) as server, closing(HTTPConnection("127.0.0.1", server.port, timeout=20)) as line:
        for _ in range(3):  # one kept-alive connection
            line.request("GET", "/health")
            assert b'"status":"ok"' in line.getresponse().read()
        assert server.log == []


@pytest.mark.parametrize(
    ("sent", "dripped"),
    [(b"", b""), (b"GET /health HT", b""), (b"GET /health HTTP/1.1\r\nX: ", b"a"), (build_request("/boxes", length=100), b" ")],
    ids=["nothing", "half a header", "a header by drops", "a body by drops"],
)
def test_who_stalls_is_cut_off(sent: bytes, dripped: bytes) -> None:
    """Findings 8 and 21: a client that stalls is disconnected, and sending single bytes does not
    restart its time limit. Formerly no connection was ever closed."""

    def stalls(server: RunningServer, *, num_bytes: int) -> bool:
        with server.connect() as line:
            line.sendall(sent)
            for _ in range(num_bytes):
                if is_cut(line, within_s=0.1):
                    return False
                try:
                    line.sendall(dripped)
                except OSError:
                    return False
            return True

    with serve_sandbox(connections=fresh(OPEN)) as server:
        assert stalls(server, num_bytes=12), "without the wall"
    with serve_sandbox(connections=fresh(QUICK)) as server:
        assert not stalls(server, num_bytes=60)


def test_a_kept_connection_owes_its_next_header_in_time() -> None:
    """A kept-alive connection must complete its next header in time. The keep-alive timeout of
    uvicorn ends with the first byte."""

    def stalls(server: RunningServer, *, within_s: float) -> bool:
        with closing(HTTPConnection("127.0.0.1", server.port, timeout=20)) as line:
            line.request("GET", "/health")
            assert line.getresponse().read()
            line.sock.sendall(b"G")
            return not is_cut(line.sock, within_s=within_s)

    with serve_sandbox(connections=fresh(OPEN)) as server:
        assert stalls(server, within_s=1.2), "without the wall"
    with serve_sandbox(connections=fresh(QUICK)) as server:
        assert not stalls(server, within_s=6.0)


def half_open(server: RunningServer, lines: ExitStack, *, count: int) -> list[socket]:
    return [lines.enter_context(server.connect()) for _ in range(count)]


def test_half_open_connections_make_nobody_deaf() -> None:
    """Finding 8: half-open connections do not make the server unresponsive, as 300 of them formerly
    did. Connections that have been waiting longest for a header are closed first."""
    with serve_sandbox(connections=fresh(OPEN)) as server, ExitStack() as lines:
        half_open(server, lines, count=60)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert len(server.server.server_state.connections) >= 60, "without the wall: all are held"
    with serve_sandbox(connections=ConnectionRegistry(max_connections=20)) as server, ExitStack() as lines:
        silent = half_open(server, lines, count=60)
        began = time.monotonic()
        assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
        assert time.monotonic() - began < ConnectionRegistry().header_timeout_s, "it need not wait for the silent ones' end"
        assert len(server.server.server_state.connections) <= 21
        assert is_cut(silent[0], within_s=5) and not is_cut(silent[-1], within_s=0.2), "the oldest goes first"


def test_a_request_at_work_is_not_cut_for_silent_ones() -> None:
    """A request in progress is not closed in favor of new connections."""
    with serve_sandbox(connections=ConnectionRegistry(max_connections=4)) as server, ExitStack() as lines:
        box = httpx.post(f"{server.url}/boxes", json={}).json()["box"]
        work = lines.enter_context(server.connect())
        work.sendall(build_request(f"/boxes/{box}/calls", {"call": "a", "code": "sleep 1"}, headers="Connection: close\r\n"))
        assert until(lambda: len(server.pool.timeouts) == 1, 10)
        half_open(server, lines, count=30)
        assert b'"text":"sleep 1"' in read_answer(work)


def deaf(server: RunningServer, lines: ExitStack) -> socket:
    """Return a connection that requests a large file and reads nothing of it."""
    box = httpx.post(f"{server.url}/boxes", json={}).json()["box"]
    line = lines.enter_context(server.connect())
    line.sendall(build_request(f"/boxes/{box}/files", {"names": [str(FETCHED)]}))
    return line


def unread(server: RunningServer) -> int:
    return sum(line.transport.get_write_buffer_size() for line in list(server.server.server_state.connections))


def until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def test_an_answer_that_nobody_takes_is_thrown_away() -> None:
    """A response that the client does not read is discarded after its time limit. Plain uvicorn
    keeps the response and its connection forever."""
    with serve_sandbox(connections=fresh(OPEN)) as server, ExitStack() as lines:
        deaf(server, lines)
        assert until(lambda: unread(server) > FETCHED // 2, 10)
        assert not until(lambda: unread(server) == 0, 1.5), "without the wall"
    with serve_sandbox(connections=fresh(QUICK)) as server, ExitStack() as lines:
        deaf(server, lines)
        assert until(lambda: unread(server) > FETCHED // 2, 10)
        assert until(lambda: unread(server) == 0, 10)


def test_answers_that_nobody_takes_have_a_total() -> None:
    """The total size of unread responses is limited. The oldest responses are discarded, and the
    latest clients receive theirs."""
    for line, most in ((fresh(OPEN), math.inf), (ConnectionRegistry(max_unread_bytes=2 * FETCHED), 4 * FETCHED)):
        with serve_sandbox(connections=line) as server, ExitStack() as lines:
            for _ in range(6):
                deaf(server, lines)
            if math.isinf(most):
                assert until(lambda: unread(server) > 4 * FETCHED, 20), "without the wall"
            else:
                last = deaf(server, lines)
                assert len(last.recv(1 << 12)) > 0 and unread(server) < most
            box = httpx.post(f"{server.url}/boxes", json={}).json()["box"]
            assert len(httpx.post(f"{server.url}/boxes/{box}/files", json={"names": ["1000"]}).json()["1000"]) == 1336


def test_a_long_answer_to_a_slow_reader_is_not_cut_by_the_time_of_the_next_header() -> None:
    """The time limit for the next header does not run while a client still reads its response."""
    with serve_sandbox(connections=ConnectionRegistry(header_timeout_s=0.3, response_timeout_s=60)) as server, ExitStack() as lines:
        line = deaf(server, lines)
        time.sleep(1.0)
        assert line.recv(1 << 12)
        line.shutdown(1)
        assert len(read_answer(line)) > FETCHED


def test_what_clients_bring_about_is_not_logged_without_end() -> None:
    """Finding 8: malformed requests, clients that leave during a call, and WebSocket requests do
    not fill the log, which formerly grew by 205 MB in a minute. `LogRateLimiter(3)` passes three
    records per window."""
    with serve_sandbox() as server:
        for number in range(40):
            box = httpx.post(f"{server.url}/boxes", json={}).json()["box"]  # a client that left during a call has lost its box
            with server.connect() as line:
                line.sendall(b"\0\0\r\n\r\n")
                assert read_answer(line).startswith(b"HTTP/1.1 400")
            with server.connect() as line:
                line.sendall(build_request("/health", method="GET", headers="Connection: upgrade, close\r\nUpgrade: websocket\r\n"))
                line.recv(100)
            with server.connect() as line:
                line.sendall(build_request(f"/boxes/{box}/calls", {"call": f"{number}", "code": "sleep 9"}))
                assert until(lambda begun=number + 1: len(server.pool.timeouts) == begun, 5)
        assert server.log == []
    sparse, record = LogRateLimiter(3), logging.makeLogRecord({})
    assert [sparse.filter(record) for _ in range(5)] == [True, True, True, False, False]
    sparse.window_start -= 61
    assert sparse.filter(record)
