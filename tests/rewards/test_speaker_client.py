"""Tests the client of the speakers over real HTTP: identical concurrent requests are sent once,
failed ones are retried, and no failure becomes a description."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_rl.config import SpeakerSettings
from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.tasks.lewis.speaker_client import SpeakerClient
from tests.support.model_server_process import encode_base64


class Speaking(ThreadingHTTPServer):
    """Responds to each POST with the next (status, body) of `answers`, and then always with the
    last one. Records the requests."""

    def __init__(self, answers: list[tuple[int, object]]) -> None:
        self.answers, self.asked, self.tokens = answers, [], []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._say(200, {"version": "one"})

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.tokens.append(self.headers.get("authorization"))
        answers = self.server.answers
        self._say(*(answers.pop(0) if len(answers) > 1 else answers[0]))

    def _say(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def speaking(*answers: tuple[int, object]) -> Iterator[Speaking]:
    with Speaking(list(answers)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def used(settings: SpeakerSettings, use: Callable[[SpeakerClient], Awaitable[object]]) -> object:
    async def main() -> object:
        client = SpeakerClient(settings)
        await client.start()
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(main())


def test_it_is_asked_once_at_a_time_and_nothing_is_kept(tmp_path: Path) -> None:
    """Two concurrent requests for one image and category are sent once, and another category is a
    second request. The same request later is sent again and returns the new description."""
    token = tmp_path / "token"
    token.write_text("a-word-of-many-letters\n")

    async def use(client: SpeakerClient) -> object:
        together = await asyncio.gather(*(client.describe_image(b"x", category=kind) for kind in ("mug", "mug", "cap")))
        return together, await client.describe_image(b"x", category="mug")

    with speaking((200, {"text": "a"}), (200, {"text": "a"}), (200, {"text": "b", "thinking": ""})) as server:
        together, later = used(SpeakerSettings(urls=[server.url], token_file=str(token)), use)
        assert together == ["a", "a", "a"] and later == "b"
        asked = [each["category"] for each in server.asked]
        assert sorted(asked[:2]) == ["cap", "mug"] and asked[2:] == ["mug"]
        assert server.asked[0]["image"] == {"base64": encode_base64(b"x")} and {*server.tokens} == {"Bearer a-word-of-many-letters"}


def test_one_that_fails_is_asked_again_and_one_that_refuses_is_not() -> None:
    """A failed or malformed response is retried, a 422 is not. After all attempts, an InfraError is
    raised that is not permanent."""

    async def use(client: SpeakerClient) -> object:
        return await client.describe_image(b"x", category="mug")

    with speaking((503, {"detail": "busy"}), (200, {"words": 1}), (200, {"text": "a"})) as server:
        assert used(SpeakerSettings(urls=[server.url], max_attempts=3), use) == "a" and len(server.asked) == 3
    with speaking((422, {"detail": "no picture"})) as server:
        with pytest.raises(PermanentInfraError, match="HTTP 422.*no picture"):
            used(SpeakerSettings(urls=[server.url], max_attempts=3), use)
        assert len(server.asked) == 1
    with speaking((500, {"detail": "x"})) as server, pytest.raises(InfraError, match="speaker: failed after 2 of 2 attempts") as caught:
        used(SpeakerSettings(urls=[server.url], max_attempts=2), use)
    assert not isinstance(caught.value, PermanentInfraError)


def test_none_that_answers_ends_the_start() -> None:
    with pytest.raises(InfraError, match=r"task.speaker.urls=\['http://127.0.0.1:9'\]: no speaker is available"):
        used(SpeakerSettings(urls=["http://127.0.0.1:9"]), lambda client: asyncio.sleep(0))
