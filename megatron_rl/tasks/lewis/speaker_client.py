"""Client of the Lewis speakers (tasks/lewis/server/speaker_app.py). Failures raise InfraError.

Replies are not cached, because another run may be training the speaker. Concurrent identical
requests are merged.
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
from megatron_rl_sandbox.messages import encode_base64

TOKEN_FILE_KEY = "task.speaker.token_file"


class _DescribeReply(BaseModel):
    text: str


class SpeakerClient:
    """Client of a group of speaker servers.

    The attribute `endpoints` contains the request counters.
    """

    def __init__(self, settings: SpeakerSettings) -> None:
        """Create the client.

        Raises:
            ValueError: The token file cannot be read.
        """
        self.settings = settings
        self.endpoints = EndpointPool(
            settings.urls, name="speaker", max_attempts=settings.max_attempts, timeout_s=settings.timeout_s,
            outage_timeout_s=settings.outage_timeout_s,
            concurrency=settings.concurrency,
        )  # fmt: skip
        self._token = read_partner_token(settings.token_file, config_key=TOKEN_FILE_KEY)
        self._pending: dict[tuple[str, str], asyncio.Task[str]] = {}

    async def start(self) -> None:
        """Connect to the speakers in the running event loop.

        Raises:
            InfraError: No speaker responds, or a speaker rejects the token.
        """
        self.endpoints.start()
        http, urls = open_http_client(self._token), self.settings.urls
        asked = [check_partner(http, url, config_key=TOKEN_FILE_KEY, token=self._token) for url in urls]
        self._http, greetings = http, dict(zip(urls, await asyncio.gather(*asked), strict=True))
        if warning := health_warning(greetings, role="speaker"):
            print(f"warning: {warning}", file=sys.stderr, flush=True)

    async def close(self) -> None:
        """Cancel pending requests and close the connections."""
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await self._http.aclose()

    async def describe_image(self, image_bytes: bytes, *, category: str) -> str:
        """Return the speaker's full reply for an image file.

        Raises:
            PermanentInfraError: The speaker rejects the image or the category.
            InfraError: All attempts failed; the message names the server and the reason.
        """
        key = hashlib.sha256(image_bytes).hexdigest(), category
        if key not in self._pending:
            task = self._pending[key] = asyncio.create_task(
                self.endpoints.request(lambda endpoint: self._request_description(endpoint, image_bytes, category))
            )
            task.add_done_callback(lambda _: self._pending.pop(key))
        return await asyncio.shield(self._pending[key])  # shielded: a cancelled caller must not cancel the shared request

    async def _request_description(self, endpoint: Endpoint, image_bytes: bytes, category: str) -> str:
        body = {"image": {"base64": encode_base64(image_bytes)}, "category": category}
        try:
            reply = await self._http.post(f"{endpoint.url}/describe", json=body)
            raise_for_status(reply, config_key=TOKEN_FILE_KEY)
            return _DescribeReply.model_validate_json(reply.content).text
        except (httpx2.HTTPError, httpx2.InvalidURL, UnreadBody, ValidationError) as error:
            raise EndpointError(describe_error(error, secret=self._token)) from error
