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
from megatron_rl.tasks.lewis.partner_client import check_partner, open_http_client, raise_for_status, read_partner_token
from sandbox.messages import encode_base64

TOKEN_FILE_KEY = "task.speaker.token_file"


class _DescribeReply(BaseModel):
    text: str


class SpeakerClient:
    """Counts of its work stand in those of `servers`."""

    def __init__(self, settings: SpeakerSettings) -> None:
        """ValueError: the file of the token cannot be read."""
        self.settings = settings
        self.endpoints = EndpointPool(
            settings.urls, name="speaker", max_attempts=settings.max_attempts, timeout_s=settings.timeout_s,
            outage_timeout_s=settings.outage_timeout_s,
            concurrency=settings.concurrency,
        )  # fmt: skip
        self._token = read_partner_token(settings.token_file, config_key=TOKEN_FILE_KEY)
        self._pending: dict[tuple[str, str], asyncio.Task[str]] = {}

    async def start(self) -> None:
        """Connect in the running event loop. InfraError: no speaker answers."""
        self.endpoints.start()
        http, urls = open_http_client(self._token), self.settings.urls
        asked = [check_partner(http, url, config_key=TOKEN_FILE_KEY, token=self._token) for url in urls]
        self._http, greetings = http, dict(zip(urls, await asyncio.gather(*asked), strict=True))
        if warning := health_warning(greetings, role="speaker"):
            print(f"warning: {warning}", file=sys.stderr, flush=True)

    async def close(self) -> None:
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await self._http.aclose()

    async def describe_image(self, image_bytes: bytes, *, category: str) -> str:
        """All of its reply about a picture's file. InfraError, naming server and reason, after the last try; PermanentInfraError: the
        picture is at fault."""
        key = hashlib.sha256(image_bytes).hexdigest(), category
        if key not in self._pending:
            task = self._pending[key] = asyncio.create_task(
                self.endpoints.request(lambda endpoint: self._request_description(endpoint, image_bytes, category))
            )
            task.add_done_callback(lambda _: self._pending.pop(key))
        return await asyncio.shield(self._pending[key])  # one who is no longer interested takes nothing from the others

    async def _request_description(self, endpoint: Endpoint, image_bytes: bytes, category: str) -> str:
        body = {"image": {"base64": encode_base64(image_bytes)}, "category": category}
        try:
            reply = await self._http.post(f"{endpoint.url}/describe", json=body)
            raise_for_status(reply, config_key=TOKEN_FILE_KEY)
            return _DescribeReply.model_validate_json(reply.content).text
        except (httpx2.HTTPError, httpx2.InvalidURL, UnreadBody, ValidationError) as error:
            raise EndpointError(describe_error(error, secret=self._token)) from error
