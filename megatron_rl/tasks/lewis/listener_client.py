"""Client of the Lewis listeners.

If a listener fails, the client raises InfraError instead of returning a score.

Results are cached by image, question and listener version. The result for each image can be cached
separately, because p(yes) of an image depends neither on the other candidates nor on their order.
The cache is kept in memory. With task.listener.cache, it is also written to a file. With
task.listener.partner_is_training, nothing is cached. Concurrent identical requests are merged.
Questions are sent in chunks. Each chunk goes to the least busy healthy server, with retries and
backoff (clients/endpoint_pool.py).

The contents of an image are sent to each server only once; later requests contain the hash of the
image. If the server no longer has the image, the server reports the hash as unknown, and the client
sends the image again. With task.listener.send=paths, file paths are sent instead of contents.
"""

import asyncio
import hashlib
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import httpx2
from pydantic import BaseModel, ValidationError

from megatron_rl.clients.endpoint_pool import Endpoint, EndpointError, EndpointPool, describe_error, to_one_line
from megatron_rl.clients.health_check import health_warning
from megatron_rl.clients.openai import UnreadBody
from megatron_rl.clients.proxies import proxy_hint
from megatron_rl.config import ListenerSettings, require
from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.rewards.verdict_cache import VerdictCache
from megatron_rl.tasks.lewis.listener_protocol import BatchScoreResponse, ListenerScore, make_listener_score
from megatron_rl.tasks.lewis.partner_client import check_partner, open_http_client, raise_for_status, read_partner_token
from megatron_rl_sandbox.messages import encode_base64


@dataclass(slots=True, frozen=True)
class ListenerConfigKeys:
    """Config keys of a listener's URLs and token file, and its name in error messages."""

    name: str = "listener"
    urls: str = "task.listener.urls"
    token_file: str = "task.listener.token_file"


@dataclass(slots=True, frozen=True)
class ImageFile:
    """Contents of an image file."""

    content: bytes
    path: str = ""
    """Path of the file, for servers that share the file system."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the contents."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(slots=True, frozen=True)
class _PendingQuestion:
    question: str
    images: Mapping[str, ImageFile]
    """Maps image hashes to images, in the order of the question's candidates."""
    result: asyncio.Future[dict[str, float]]
    """Future whose result maps each image hash to log p(yes)."""


class _UnknownImages(BaseModel):
    class Detail(BaseModel):
        unknown: list[str]

    detail: Detail


class ListenerClient:
    """Client of a group of listener servers that serve the same model.

    `cache_hits` is the number of questions that were answered from the cache or by a concurrent
    identical request. The attribute `endpoints` contains the request counters.
    """

    def __init__(self, settings: ListenerSettings, config_keys: ListenerConfigKeys = ListenerConfigKeys()) -> None:
        self.settings, self._config_keys = settings, config_keys
        self.endpoints = EndpointPool(
            settings.urls, name=config_keys.name, max_attempts=settings.max_attempts, timeout_s=settings.timeout_s,
            outage_timeout_s=settings.outage_timeout_s,
            concurrency=settings.concurrency, backoff_s=settings.backoff_s,
        )  # fmt: skip
        self.version = ""
        """Version of the listeners, which `start` sets. A response with another version is
        rejected. With settings.partner_is_training, such a response is accepted and updates this
        field.
        """
        self.num_version_changes = 0
        """Number of responses with a different version than the previous response."""
        self.cache_hits = 0
        self._token = read_partner_token(settings.token_file, config_key=config_keys.token_file)
        self._memory: OrderedDict[str, float] = OrderedDict()
        self._pending: dict[tuple[str, frozenset[str]], asyncio.Future[dict[str, float]]] = {}
        self._chunk: list[_PendingQuestion] = []
        self._tasks: set[asyncio.Task[list[dict[str, float] | InfraError]]] = set()
        self._sent_hashes: dict[str, set[str]] = {url: set() for url in settings.urls}
        """Maps the URL of each server to the hashes of the images that the server has."""

    async def start(self) -> None:
        """Connect to the listeners in the running event loop.

        Raises:
            InfraError: No listener responds, a listener rejects the token, or the listeners have
                different versions.
        """
        settings = self.settings
        self._file = VerdictCache(settings.cache, read_only=False, config_key="task.listener.cache") if settings.cache else None
        self.endpoints.start()
        http = self._http = open_http_client(self._token, proxied=self._sent_hashes if settings.proxy else ())
        key = self._config_keys.token_file
        asked = [check_partner(http, url, config_key=key, token=self._token, proxy=self._proxy_words(url)) for url in self._sent_hashes]
        greetings = dict(zip(self._sent_hashes, await asyncio.gather(*asked), strict=True))
        if warning := health_warning(greetings, role="listener", key=self._config_keys.urls):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        versions = {url: greeting.models[0] for url, greeting in greetings.items() if greeting.models}
        if len(set(versions.values())) > 1:
            raise InfraError(
                f"{self._config_keys.urls}: the listeners have different versions ({versions}); all of them must serve the same model"
            )
        self.version = next(iter(versions.values()))

    def _proxy_words(self, url: str) -> str:
        return proxy_hint(url) if self.settings.proxy else ""

    async def close(self) -> None:
        """Cancel pending requests, and close the connections and the cache file."""
        for asked in self._chunk:
            asked.result.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()
        if self._file is not None:
            self._file.close()

    async def score_images(self, images: Sequence[ImageFile], question: str) -> ListenerScore:
        """Return the listener's score for a question about candidate images.

        Raises:
            PermanentInfraError: Two candidate images are identical, or the request is invalid.
            InfraError: All attempts failed; the message names the server and the reason.
        """
        shown = await asyncio.to_thread(lambda: {picture.sha256: picture for picture in images})
        if len(shown) < len(images):
            raise PermanentInfraError("listener: two of the candidates are the same image")
        known = {digest: None if self.settings.partner_is_training else self._find_cached(digest, question) for digest in shown}
        found = [logprob for logprob in known.values() if logprob is not None]
        if len(found) == len(known):
            self.cache_hits += 1
            return make_listener_score(found)
        key = (question, frozenset(shown))
        self.cache_hits += key in self._pending
        if key not in self._pending:
            self._enqueue(key, _PendingQuestion(question, shown, asyncio.get_running_loop().create_future()))
        logprobs = await asyncio.shield(self._pending[key])  # shielded: a cancelled caller must not cancel the shared request
        return make_listener_score([logprobs[digest] for digest in shown])

    def _find_cached(self, digest: str, question: str) -> float | None:
        key = self._cache_key(digest, question)
        if key not in self._memory and self._file is not None:
            found = self._file.find(key)
            if found is not None:
                _check_cached_logprob(found, path=self.settings.cache)
                self._cache_in_memory(key, found)
        if key in self._memory:
            self._memory.move_to_end(key)
        return self._memory.get(key)

    def _cache_key(self, digest: str, question: str) -> str:
        return hashlib.blake2b(json.dumps([self.version, digest, question]).encode(), digest_size=20).hexdigest()

    def _cache_in_memory(self, key: str, logprob: float) -> None:
        self._memory[key] = logprob
        while len(self._memory) > self.settings.cache_entries:
            self._memory.popitem(last=False)

    def _enqueue(self, key: tuple[str, frozenset[str]], asked: _PendingQuestion) -> None:
        """Add a question to the current chunk.

        The chunk is sent when the chunk is full or `chunk_delay_s` seconds after the first question
        was added, whichever comes first.
        """
        self._pending[key] = asked.result
        asked.result.add_done_callback(lambda _: self._pending.pop(key))
        self._chunk.append(asked)
        if len(self._chunk) >= self.settings.chunk_size:
            self._send_chunk(self._chunk)
        elif len(self._chunk) == 1:
            asyncio.get_running_loop().call_later(self.settings.chunk_delay_s, self._send_chunk, self._chunk)

    def _send_chunk(self, chunk: list[_PendingQuestion]) -> None:
        """Send a chunk, unless it has already been sent."""
        if chunk is self._chunk:
            self._chunk = []
            task = asyncio.create_task(self._request_chunk(chunk))
            self._tasks.add(task)
            task.add_done_callback(partial(self._resolve_chunk, chunk))

    def _resolve_chunk(self, chunk: Sequence[_PendingQuestion], task: asyncio.Task[list[dict[str, float] | InfraError]]) -> None:
        self._tasks.discard(task)
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        results = [failure] * len(chunk) if failure else task.result()
        for asked, result in zip(chunk, results, strict=True):
            if asked.result.done():
                continue
            if isinstance(result, asyncio.CancelledError):
                asked.result.cancel()
            elif isinstance(result, BaseException):
                asked.result.set_exception(result)
                asked.result.exception()  # mark as retrieved, because there may be no caller left
            else:
                asked.result.set_result(result)

    async def _request_chunk(self, chunk: Sequence[_PendingQuestion]) -> list[dict[str, float] | InfraError]:
        """Return the result or the error for each question of a chunk.

        If the chunk is rejected, each question is sent separately, so that an invalid question does
        not cause the other questions to fail.
        """
        try:
            answers = await self.endpoints.request(lambda endpoint: self._query_endpoint(endpoint, chunk))
        except PermanentInfraError as fault:
            if len(chunk) == 1:
                return [fault]
            return [result for asked in chunk for result in await self._request_chunk([asked])]
        except InfraError as fault:
            return [fault] * len(chunk)
        for asked, logprobs in zip(
            chunk, [] if self.settings.partner_is_training else answers, strict=not self.settings.partner_is_training
        ):
            for digest, logprob in logprobs.items():
                key = self._cache_key(digest, asked.question)
                self._cache_in_memory(key, logprob)
                if self._file is not None:
                    words = json.dumps({"question": asked.question, "picture": digest})
                    self._file.store(key, model=self.version, prompt="listener", fields=words, verdict=logprob)
        return list(answers)

    async def _query_endpoint(self, endpoint: Endpoint, chunk: Sequence[_PendingQuestion]) -> list[dict[str, float]]:
        sent = self._sent_hashes[endpoint.url]
        reply = await self._post(endpoint, chunk, known_hashes=sent)
        if reply.status_code == 404:
            sent.difference_update(_read_unknown_hashes(reply))
            reply = await self._post(endpoint, chunk, known_hashes=set())
        raise_for_status(reply, config_key=self._config_keys.token_file)
        answers = self._parse_response(reply.content, chunk)
        sent.update(digest for asked in chunk for digest in asked.images)
        return answers

    async def _post(self, endpoint: Endpoint, chunk: Sequence[_PendingQuestion], *, known_hashes: set[str]) -> httpx2.Response:
        """Send a chunk.

        With task.listener.send=paths, every image with a path is sent as a path. Any other image is
        sent in full once per chunk if its hash is not in `known_hashes`. All other occurrences are
        sent as a hash.
        """
        told_of, batch = set(known_hashes), []
        for asked in chunk:
            candidates = []
            for digest, picture in asked.images.items():
                by_path = self.settings.send == "paths" and picture.path
                full = {"path": picture.path} if by_path else {"base64": encode_base64(picture.content)}
                candidates.append({"sha256": digest} if digest in told_of and not by_path else full)
                told_of.add(digest)
            batch.append({"question": asked.question, "candidates": candidates})
        try:
            return await self._http.post(f"{endpoint.url}/batch_score", json={"batch": batch})
        except (httpx2.HTTPError, httpx2.InvalidURL, UnreadBody) as error:
            raise EndpointError(describe_error(error, secret=self._token) + self._proxy_words(endpoint.url)) from error

    def _parse_response(self, content: bytes, chunk: Sequence[_PendingQuestion]) -> list[dict[str, float]]:
        try:
            answers = BatchScoreResponse.model_validate_json(content)
        except ValidationError as error:
            raise EndpointError(describe_error(error)) from error
        if answers.version != self.version and self.settings.partner_is_training:
            self.version = answers.version
            self.num_version_changes += 1
        if answers.version != self.version:
            raise EndpointError(f"is a different listener: its version is {to_one_line(answers.version)} instead of {self.version}")
        lengths = [len(result.yes_logprobs) for result in answers.results]
        if lengths != [len(asked.images) for asked in chunk]:
            raise EndpointError(f"returned {lengths} scores for the questions, which does not match the request")
        return [dict(zip(asked.images, result.yes_logprobs, strict=True)) for asked, result in zip(chunk, answers.results, strict=True)]


def make_listener_client(settings: ListenerSettings) -> ListenerClient:
    """Return a client of the listeners in `settings`.

    Raises:
        ValueError: No listener is configured.
    """
    remedy = (
        "this reward requires a listener; set the URLs, or start a listener with services.listener.kind=listener and set [service:listener]"
    )
    require(bool(settings.urls), "task.listener.urls", settings.urls, remedy)
    return ListenerClient(settings)


def _read_unknown_hashes(reply: httpx2.Response) -> list[str]:
    try:
        return _UnknownImages.model_validate_json(reply.content).detail.unknown
    except ValidationError as error:
        raise EndpointError(f"HTTP 404: {to_one_line(reply.text)}") from error


def _check_cached_logprob(found: object, *, path: str) -> None:
    """Raise PermanentInfraError if a value from the cache file is not a log probability."""
    if not isinstance(found, float) or not -math.inf < found <= 0:
        raise PermanentInfraError(f"listener: {path} contains {found!r:.40}, which is not a log probability; remove the file")
