"""Tests the access control of a real vLLM server: the permitted requests of a client without the
token, a web page, and a client with the token.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from megatron_rl.services.address import has_proven_token
from megatron_rl_sandbox.token import bearer_header
from tests.support.vllm_servers import TOKEN

CONTROL = ("/pause", "/resume", "/abort_requests", "/init_weight_transfer_engine", "/update_weights", "/collective_rpc", "/weight_checker")
PAGE = {"Host": "evil.example:18100", "Origin": "http://evil.example", "Content-Type": "text/plain;charset=UTF-8"}


@contextmanager
def trap() -> Iterator[tuple[str, list[bytes]]]:
    """Serve a URL that records the requests it receives."""
    heard: list[bytes] = []

    def listen() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:  # the listener is closed
                return
            with line:
                heard.append(line.recv(300))
                line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/internal", heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_an_engine_obeys_nobody_without_the_token(urls: list[str]) -> None:
    with httpx.Client(base_url=urls[0], timeout=60, trust_env=False) as http:
        assert {http.post(path, json={"method": "rl_fingerprint"}).status_code for path in CONTROL} == {401}
        assert {http.get(path).status_code for path in ("/version", "/metrics", "/health", "/weight_info", "/ping", "/docs")} == {401}
        for left_out, code in (((), 421), (("Host",), 403), (("Host", "Origin"), 415)):
            headers = {name: value for name, value in PAGE.items() if name not in left_out} | bearer_header(TOKEN)
            assert {http.post(path, content=b"{}", headers=headers).status_code for path in CONTROL} == {code}
        assert has_proven_token(urls[0], token=TOKEN) and not has_proven_token(urls[0], token=TOKEN + "x")
        assert http.get("/version", headers=bearer_header(TOKEN)).json()["version"].startswith("0.32")


@pytest.mark.parametrize("method", ["save_sharded_state", "update_environment_variables", "load_model"])
def test_its_worker_has_one_method(method: str, urls: list[str]) -> None:
    with httpx.Client(base_url=urls[0], timeout=60, trust_env=False, headers=bearer_header(TOKEN)) as http:
        assert http.post("/collective_rpc", json={"method": method, "args": []}).status_code == 403
        assert http.post("/collective_rpc", json={"method": "rl_fingerprint"}).json()["results"][0]["weight transfer"] == "megatron_rl"


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
def test_it_fetches_nothing(kind: str, urls: list[str]) -> None:
    with trap() as (url, heard), httpx.Client(base_url=urls[0], timeout=60, trust_env=False, headers=bearer_header(TOKEN)) as http:
        for place in (url, url.replace("http", "HTTP"), "file:///etc/hostname"):
            part = {"type": kind, "url": place, "uuid": "x1"}
            body = {"token_ids": [1, 2], "content_parts": [part], "sampling_params": {"max_tokens": 1}}
            assert not http.post("/inference/v1/generate", json=body).is_success
        assert heard == []
        assert httpx.get(url).text == "hi" and len(heard) == 1, "the trap hears who comes"
