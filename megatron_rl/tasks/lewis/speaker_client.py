"""Asks speakers of the Lewis game what they say of a picture (tasks/lewis/server/speaker_app.py); every trouble of theirs is a InfraError.

Nothing is kept: a speaker that another run trains says something else soon. What is asked for at the same time is asked once.
"""

import asyncio
import hashlib
import sys

import httpx2
from pydantic import BaseModel, ValidationError

from megatron_rl.clients.endpoint_pool import Endpoint, EndpointError, EndpointPool, describe_error
from megatron_rl.clients.health_check import health_warning
from megatron_rl.clients.openai import UnreadBody
from megatron_rl.config import SpeakerSettings
from megatron_rl.tasks.lewis.partner_client import connection, greeting_of, require_answered, token_of
from sandbox.messages import encoded

TOKEN_FILE = "task.speaker.token_file"


class _Described(BaseModel):
    text: str


class SpeakerClient:
    """Counts of its work stand in those of `servers`."""

    def __init__(self, settings: SpeakerSettings) -> None:
        """ValueError: the file of the token cannot be read."""
        self.settings = settings
        self.servers = EndpointPool(
            settings.urls, name="speaker", max_attempts=settings.max_attempts, timeout_s=settings.timeout_s,
            outage_timeout_s=settings.outage_timeout_s,
            concurrency=settings.concurrency,
        )  # fmt: skip
        self._token = token_of(settings.token_file, key=TOKEN_FILE)
        self._under_way: dict[tuple[str, str], asyncio.Task[str]] = {}

    async def start(self) -> None:
        """Connect in the running event loop. InfraError: no speaker answers."""
        self.servers.start()
        http, urls = connection(self._token), self.settings.urls
        asked = [greeting_of(http, url, key=TOKEN_FILE, token=self._token) for url in urls]
        self._http, greetings = http, dict(zip(urls, await asyncio.gather(*asked), strict=True))
        if warning := health_warning(greetings, of="speaker"):
            print(f"warning: {warning}", file=sys.stderr, flush=True)

    async def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        await self._http.aclose()

    async def describe(self, content: bytes, *, category: str) -> str:
        """All of its reply about a picture's file. InfraError, naming server and reason, after the last try; PermanentInfraError: the
        picture is at fault."""
        key = hashlib.sha256(content).hexdigest(), category
        if key not in self._under_way:
            task = self._under_way[key] = asyncio.create_task(self.servers.ask(lambda endpoint: self._said(endpoint, content, category)))
            task.add_done_callback(lambda _: self._under_way.pop(key))
        return await asyncio.shield(self._under_way[key])  # one who is no longer interested takes nothing from the others

    async def _said(self, endpoint: Endpoint, content: bytes, category: str) -> str:
        body = {"image": {"base64": encoded(content)}, "category": category}
        try:
            reply = await self._http.post(f"{endpoint.url}/describe", json=body)
            require_answered(reply, key=TOKEN_FILE)
            return _Described.model_validate_json(reply.content).text
        except (httpx2.HTTPError, httpx2.InvalidURL, UnreadBody, ValidationError) as error:
            raise EndpointError(describe_error(error, secret=self._token)) from error
