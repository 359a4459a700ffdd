"""Judge: a model on OpenAI-compatible servers that returns verdicts on answers or responses.

A failure of the judge is an InfraError and never becomes a score. A verdict is first looked up in
the cache. A verdict that is not in the cache is requested from one of the servers and then cached.
The endpoint pool (clients/endpoint_pool.py) selects the least busy healthy server and handles
retries and backoff, so the retries of the openai client (3.52.0) are switched off. Concurrent
identical requests share one call. The judge must reply with a JSON object that has one key
(judge_prompt.py). Servers with structured output enforce this format by a JSON schema.

A Judge without urls reads recorded verdicts from `cache` and sends no requests.
"""

import asyncio
import base64
import hashlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import openai
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageParam
from PIL import Image
from PIL.Image import Image as Picture

from megatron_rl.clients.endpoint_pool import Endpoint, EndpointPool, RequestRejected
from megatron_rl.clients.health_check import check_endpoints, health_warning, list_models
from megatron_rl.clients.openai import ChatCompletion, ChatMessage, api_key, make_client, translate_errors
from megatron_rl.config import JudgeSettings
from megatron_rl.config.checks import require
from megatron_rl.errors import PermanentInfraError
from megatron_rl.rewards.judge_prompt import JudgePrompt, MalformedVerdict
from megatron_rl.rewards.verdict_cache import VerdictCache
from megatron_rl.types import JudgeResult, Rollout

MAX_IMAGE_SIDE, MIN_IMAGE_SIDE = 1024, 28
"""Limits in pixels on the sides of an image that is sent to the judge. The longest side is at most
MAX_IMAGE_SIDE; shrinking leaves no side shorter than MIN_IMAGE_SIDE, which is the side of one
vision token of Qwen2.5-VL.
"""


MAX_REASONING_CHARS = 500
"""Maximum length in characters of the stored reasoning of a judge; the rest is cut off."""
MAX_CACHED_REASONINGS = 10_000
"""Maximum number of judge replies whose reasoning is kept in memory for repeated requests."""
Judgement = tuple[float, str]
"""Pair of a verdict and the judge's reasoning."""


class Judge:
    """Requests verdicts from the judge's servers and caches them.

    `get_counts` returns the verdict counters; `endpoints` contains the counters of each server.
    """

    def __init__(self, settings: JudgeSettings, *, backoff_s: float = 0.5) -> None:
        require(
            bool(settings.urls or settings.model),
            "task.judge.model",
            settings.model,
            "recorded verdicts are keyed by model; set the model name",
        )
        self.settings = settings
        self.model, self.always_ask = settings.model, settings.always_ask
        self.endpoints = EndpointPool(
            settings.urls, name="judge", max_attempts=settings.max_attempts, timeout_s=settings.timeout_s,
            outage_timeout_s=settings.outage_timeout_s, concurrency=settings.concurrency, backoff_s=backoff_s,
        )  # fmt: skip
        self.num_requests = self.cache_hits = 0
        """Counters: verdicts requested from a server, and verdicts that came from the cache or from
        a concurrent identical request.
        """
        self._clients: dict[str, openai.AsyncOpenAI] = {}
        self._api_key = ""
        """API key of the servers, set by `start`."""
        self._without_schema: set[str] = set()
        """URLs of the servers that rejected a JSON schema but accepted the same request without it.
        """
        self._pending: dict[str, asyncio.Task[Judgement]] = {}
        self._reasonings: dict[str, str] = {}
        """Maps the cache key of a verdict to the judge's reasoning; verdicts without reasoning are
        absent.
        """
        self._cache: VerdictCache | None = None
        """Cache of verdicts, opened by `start`."""

    async def start(self) -> None:
        """Connect to the servers in the running event loop.

        Prints a warning if some servers do not respond.

        Raises:
            InfraError: No server responds, or no server serves the model.
        """
        self._cache = VerdictCache(self.settings.cache, read_only=not self.settings.urls)
        self.endpoints.start()
        self._api_key = api_key(self.settings.token_file)
        for url in dict.fromkeys(self.settings.urls):
            self._clients[url] = make_client(url, secret=self._api_key)  # the timeout is enforced by `endpoints`
        warning = health_warning(
            await check_endpoints(self._clients, model=self.model, secret=self._api_key, token_file=self.settings.token_file)
        )
        if warning:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        self.model = self.model or await self.endpoints.request(self._find_served_model)

    async def close(self) -> None:
        """Cancel the pending requests, and close the clients and the cache."""
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        self._clients.clear()
        if self._cache is not None:
            self._cache.close()

    def get_counts(self) -> dict[str, int]:
        """Return the numbers of requested, cached and failed verdicts (observe/judge_stats.py)."""
        return {"called": self.num_requests, "cached": self.cache_hits, "failed": self.endpoints.failures}

    async def score_rollout(
        self, rollout: Rollout, prompt: JudgePrompt, *, fields: Mapping[str, str], images: Sequence[Picture] = (), turn: int | None = None,
        rule_score: float | None = None, is_reward: bool = True,
    ) -> float:  # fmt: skip
        """Return and record the verdict on a turn, or on the whole episode if `turn` is None.

        The verdict is added to `rollout.verdicts`, in an audit with the score of the rules. Raises
        InfraError like `get_judgement`.
        """
        clock = asyncio.get_running_loop().time
        asked = clock()
        value, words = await self.get_judgement(prompt, fields=fields, images=images)
        said = JudgeResult(
            judge=self.model, prompt=f"{prompt.name} {prompt.version}", value=value, turn=turn, wall_s=clock() - asked, reasoning=words,
            rule_score=rule_score, is_reward=is_reward,
        )  # fmt: skip
        if said not in rollout.verdicts:  # another reward term may have requested the same verdict
            rollout.verdicts.append(said)
            # make the order independent of response times
            rollout.verdicts.sort(key=lambda each: (each.turn is None, each.turn or 0, each.prompt))
        return value

    def is_audited(self, rollout: Rollout) -> bool:
        """Return whether both the rules and the judge decide on the rollout's answer.

        The choice depends on the rollout's place in its step only, so a resumed run repeats it.
        """
        place = f"{rollout.example_id}/{rollout.group}/{rollout.sample_index}"
        drawn = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest())
        return drawn < self.settings.audit_fraction * 2**64

    async def score(self, prompt: JudgePrompt, *, fields: Mapping[str, str], images: Sequence[Picture] = ()) -> float:
        """Return the verdict without the reasoning. Raises InfraError like `get_judgement`."""
        return (await self.get_judgement(prompt, fields=fields, images=images))[0]

    async def get_judgement(self, prompt: JudgePrompt, *, fields: Mapping[str, str], images: Sequence[Picture] = ()) -> Judgement:
        """Return the verdict and the reasoning, from the cache or from a server.

        Raises:
            InfraError: All attempts failed. The message names the last server and its error.
            PermanentInfraError: Retrying would not help, e.g. because there are no servers and the
                verdict is not in the cache.
        """
        urls = await asyncio.to_thread(lambda: [encode_data_url(picture) for picture in images])
        key = cache_key(self.model, prompt, fields, urls)
        assert self._cache is not None, "judged before start"
        found = self._cache.find(key)
        self.cache_hits += found is not None or key in self._pending
        if found is not None:
            check_cached_verdict(found, prompt, path=self.settings.cache)
            return found, self._reasonings.get(key, "")
        if not self._clients:
            raise PermanentInfraError(
                f"judge: {self.settings.cache} contains no verdict for prompt {prompt.name} {prompt.version}, model {self.model}"
                f" and fields {fields}"
            )
        if key not in self._pending:
            self._pending[key] = asyncio.create_task(self._request(key, prompt, fields, urls))
            self._pending[key].add_done_callback(lambda _: self._pending.pop(key))
        return await asyncio.shield(self._pending[key])  # cancelling one caller must not cancel the request for the others

    async def _request(self, key: str, prompt: JudgePrompt, fields: Mapping[str, str], urls: list[str]) -> Judgement:
        text = prompt.render(fields)
        parts: list[ChatCompletionContentPartParam] = [{"type": "text", "text": text}]
        parts.extend({"type": "image_url", "image_url": {"url": url}} for url in urls)
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": prompt.system},
            {"role": "user", "content": parts if urls else text},
        ]
        verdict, words = await self.endpoints.request(lambda endpoint: self._request_with_schema(endpoint, prompt, messages))
        self.num_requests += 1
        assert self._cache is not None, "judged before start"
        self._cache.store(key, model=self.model, prompt=f"{prompt.name} {prompt.version}", fields=json.dumps(dict(fields)), verdict=verdict)
        if words:
            self._reasonings[key] = words
            if len(self._reasonings) > MAX_CACHED_REASONINGS:
                del self._reasonings[next(iter(self._reasonings))]
        return verdict, words

    async def _request_with_schema(self, endpoint: Endpoint, prompt: JudgePrompt, messages: list[ChatCompletionMessageParam]) -> Judgement:
        wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": prompt.schema}}
        if endpoint.url not in self._without_schema:
            try:
                return parse_judgement(
                    await self._chat_completion(endpoint, messages, response_format=wanted), prompt, secret=self._api_key
                )
            except RequestRejected:
                reply = await self._chat_completion(endpoint, messages)
                self._without_schema.add(endpoint.url)  # the schema was the reason for the rejection
                return parse_judgement(reply, prompt, secret=self._api_key)
        return parse_judgement(await self._chat_completion(endpoint, messages), prompt, secret=self._api_key)

    async def _chat_completion(self, endpoint: Endpoint, messages: list[ChatCompletionMessageParam], **options: Any) -> ChatMessage:
        with translate_errors(self._api_key, token_file=self.settings.token_file):
            raw = await self._clients[endpoint.url].chat.completions.with_raw_response.create(
                model=self.model,
                messages=messages,
                temperature=self.settings.temperature,
                max_completion_tokens=self.settings.max_tokens,
                **options,
            )
            return ChatCompletion.model_validate_json(raw.content).choices[0].message

    async def _find_served_model(self, endpoint: Endpoint) -> str:
        with translate_errors(self._api_key, token_file=self.settings.token_file):
            return (await list_models(self._clients[endpoint.url]))[0]


def parse_judgement(message: ChatMessage, prompt: JudgePrompt, *, secret: str) -> Judgement:
    """Return a reply's verdict and reasoning, with `secret` redacted. Raises MalformedVerdict."""
    words = message.thoughts.replace(secret, "***") if secret else message.thoughts
    return parse_verdict(message.content, prompt, secret=secret), words[:MAX_REASONING_CHARS]


def parse_verdict(reply: str, prompt: JudgePrompt, *, secret: str) -> float:
    """Return the verdict in a reply.

    Raises MalformedVerdict if the reply is not a valid verdict. In the error message, `secret` is
    redacted, because the server may have repeated it in the reply.
    """
    try:
        return prompt.parse_verdict(reply)
    except MalformedVerdict:
        if not secret:
            raise
        return prompt.parse_verdict(reply.replace(secret, "***"))  # raises again, with the secret redacted in the message


def check_cached_verdict(found: object, prompt: JudgePrompt, *, path: str) -> None:
    """Raise PermanentInfraError if a cached value is not one of the prompt's verdicts."""
    if not isinstance(found, float) or found not in prompt.values:
        what = f"{found!r:.40} for prompt {prompt.name} {prompt.version}, which is not a valid verdict"
        raise PermanentInfraError(f"judge: {path} contains {what}; remove the file")


def make_judge(settings: JudgeSettings) -> Judge | None:
    """Return a judge if the settings name servers or a file of recorded verdicts, else None.

    Raises:
        ValueError: The settings name a judge model but neither servers nor a file.
    """
    chosen = f"the judge model is {settings.model}; set the addresses of its servers, or its recorded verdicts (task.judge.cache)"
    require(bool(settings.urls or settings.cache or not settings.model), "task.judge.urls", settings.urls, chosen)
    return Judge(settings) if settings.urls or settings.cache else None


def cache_key(model: str, prompt: JudgePrompt, fields: Mapping[str, str], urls: Sequence[str]) -> str:
    """Return a hash of everything that can affect a verdict.

    The hash includes the rendered prompt, so old verdicts become invalid when the prompt or the
    quoting of its fields (text_quoting.py) changes.
    """
    words = [model, prompt.name, prompt.version, prompt.system, prompt.render(fields), list(urls)]
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=20).hexdigest()


def encode_data_url(picture: Picture) -> str:
    """Encode an image as a data URL in JPEG format with quality 85.

    Transparent pixels are composited over white. The longest side is at most MAX_IMAGE_SIDE.
    """
    shrink = min(1.0, MAX_IMAGE_SIDE / max(picture.size))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    picture = picture.convert("RGB")
    if shrink < 1:
        width, height = (max(min(side, MIN_IMAGE_SIDE), round(side * shrink)) for side in picture.size)
        picture = picture.resize((width, height))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
