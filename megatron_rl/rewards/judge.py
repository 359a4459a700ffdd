"""A model behind OpenAI-compatible servers that gives verdicts; every trouble of its own is a InfraError and never a score.

One verdict is: looked up in the cache; else asked for, together with whoever asks the same at the same time, of one of the servers
(clients/endpoint_pool.py: the least busy healthy one, several tries, rests); kept. Its reply is a JSON object of one key
(judge_prompt.py), which servers that can are made to produce by JSON schema. openai 3.52.0; its own retries are off.

Without urls a Judge is a recorded one: it reads the verdicts of `cache` and asks nobody.
"""

import asyncio
import base64
import hashlib
import io
import json
import sys
from collections.abc import Mapping, Sequence

import openai
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
"""Pixels of a picture that a judge is shown; a larger one is shrunk, no side below what Qwen2.5-VL takes for one patch."""


MAX_REASONING_CHARS = 500
"""Characters that are kept of what a judge thought."""
MAX_CACHED_REASONINGS = 10_000
"""Verdicts whose words are there for who asks the same again."""
Judgement = tuple[float, str]
"""A verdict, and the words before it."""


class Judge:
    """Counts of its work: `counts`, and those of `servers`."""

    def __init__(self, settings: JudgeSettings, *, backoff_s: float = 0.5) -> None:
        require(bool(settings.urls or settings.model), "task.judge.model", settings.model, "recorded verdicts are kept by model; name it")
        self.settings = settings
        self.model, self.always_ask = settings.model, settings.always_ask
        self.endpoints = EndpointPool(
            settings.urls, name="judge", max_attempts=settings.max_attempts, timeout_s=settings.timeout_s,
            outage_timeout_s=settings.outage_timeout_s, concurrency=settings.concurrency, backoff_s=backoff_s,
        )  # fmt: skip
        self.num_requests = self.cache_hits = 0
        """Verdicts that a server gave; verdicts that were kept, or that another request under way brought."""
        self._clients: dict[str, openai.AsyncOpenAI] = {}
        self._api_key = ""
        """The servers' key, from `start` on."""
        self._without_schema: set[str] = set()
        """Servers that have refused a JSON schema and gone on without."""
        self._pending: dict[str, asyncio.Task[Judgement]] = {}
        self._reasonings: dict[str, str] = {}
        """By the key of a verdict, where there were some."""
        self._cache: VerdictCache | None = None
        """From `start` on."""

    async def start(self) -> None:
        """Connect in the running event loop. InfraError: no server answers, or none serves the model. Where only some do, a line says
        so."""
        self._cache = VerdictCache(self.settings.cache, read_only=not self.settings.urls)
        self.endpoints.start()
        self._api_key = api_key(self.settings.token_file)
        for url in dict.fromkeys(self.settings.urls):
            self._clients[url] = make_client(url, secret=self._api_key)  # `servers` hold it to its time
        warning = health_warning(
            await check_endpoints(self._clients, model=self.model, secret=self._api_key, token_file=self.settings.token_file)
        )
        if warning:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        self.model = self.model or await self.endpoints.request(self._find_served_model)

    async def close(self) -> None:
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        self._clients.clear()
        if self._cache is not None:
            self._cache.close()

    def get_counts(self) -> dict[str, int]:
        """Return what this process has asked (observe/judge_stats.py)."""
        return {"called": self.num_requests, "cached": self.cache_hits, "failed": self.endpoints.failures}

    async def score_rollout(
        self, rollout: Rollout, prompt: JudgePrompt, *, fields: Mapping[str, str], images: Sequence[Picture] = (), turn: int | None = None
    ) -> float:  # fmt: skip
        """What is `said`, which the rollout keeps: of this turn, or of the whole."""
        clock = asyncio.get_running_loop().time
        asked = clock()
        value, words = await self.get_judgement(prompt, fields=fields, images=images)
        said = JudgeResult(
            judge=self.model, prompt=f"{prompt.name} {prompt.version}", value=value, turn=turn, wall_s=clock() - asked, reasoning=words
        )
        if said not in rollout.verdicts:  # by another part of the reward
            rollout.verdicts.append(said)
            rollout.verdicts.sort(key=lambda each: (each.turn is None, each.turn or 0, each.prompt))  # whoever answered first
        return value

    async def score(self, prompt: JudgePrompt, *, fields: Mapping[str, str], images: Sequence[Picture] = ()) -> float:
        """`said`, without the words."""
        return (await self.get_judgement(prompt, fields=fields, images=images))[0]

    async def get_judgement(self, prompt: JudgePrompt, *, fields: Mapping[str, str], images: Sequence[Picture] = ()) -> Judgement:
        """Raises InfraError, naming server and reason, after the last try."""
        urls = await asyncio.to_thread(lambda: [encode_data_url(picture) for picture in images])
        key = cache_key(self.model, prompt, fields, urls)
        found = self._cache.find(key)
        self.cache_hits += found is not None or key in self._pending
        if found is not None:
            check_cached_verdict(found, prompt, path=self.settings.cache)
            return found, self._reasonings.get(key, "")
        if not self._clients:
            raise PermanentInfraError(
                f"judge: {self.settings.cache} holds no verdict of {prompt.name} {prompt.version} by {self.model} on {fields}"
            )
        if key not in self._pending:
            self._pending[key] = asyncio.create_task(self._request(key, prompt, fields, urls))
            self._pending[key].add_done_callback(lambda _: self._pending.pop(key))
        return await asyncio.shield(self._pending[key])  # one who is no longer interested takes nothing from the others

    async def _request(self, key: str, prompt: JudgePrompt, fields: Mapping[str, str], urls: list[str]) -> Judgement:
        text = prompt.render(fields)
        parts = [{"type": "text", "text": text}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
        messages = [{"role": "system", "content": prompt.system}, {"role": "user", "content": parts if urls else text}]
        verdict, words = await self.endpoints.request(lambda endpoint: self._request_with_schema(endpoint, prompt, messages))
        self.num_requests += 1
        self._cache.store(key, model=self.model, prompt=f"{prompt.name} {prompt.version}", fields=json.dumps(dict(fields)), verdict=verdict)
        if words:
            self._reasonings[key] = words
            if len(self._reasonings) > MAX_CACHED_REASONINGS:
                del self._reasonings[next(iter(self._reasonings))]
        return verdict, words

    async def _request_with_schema(self, endpoint: Endpoint, prompt: JudgePrompt, messages: list[dict[str, object]]) -> Judgement:
        wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": prompt.schema}}
        if endpoint.url not in self._without_schema:
            try:
                return parse_judgement(
                    await self._chat_completion(endpoint, messages, response_format=wanted), prompt, secret=self._api_key
                )
            except RequestRejected:
                reply = await self._chat_completion(endpoint, messages)
                self._without_schema.add(endpoint.url)  # what it refused was the schema
                return parse_judgement(reply, prompt, secret=self._api_key)
        return parse_judgement(await self._chat_completion(endpoint, messages), prompt, secret=self._api_key)

    async def _chat_completion(self, endpoint: Endpoint, messages: list[dict[str, object]], **options: object) -> ChatMessage:
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
    """Malformed: there is no verdict in it. Words are without a secret that the server repeated."""
    words = message.thoughts.replace(secret, "***") if secret else message.thoughts
    return parse_verdict(message.content, prompt, secret=secret), words[:MAX_REASONING_CHARS]


def parse_verdict(reply: str, prompt: JudgePrompt, *, secret: str) -> float:
    """Malformed: see JudgePrompt.read; a secret that the server repeated is not told."""
    try:
        return prompt.parse_verdict(reply)
    except MalformedVerdict:
        if not secret:
            raise
        return prompt.parse_verdict(reply.replace(secret, "***"))  # no verdict either: told without the secret


def check_cached_verdict(found: object, prompt: JudgePrompt, *, path: str) -> None:
    """PermanentInfraError: a file of verdicts holds something that this prompt's judge can never have said."""
    if not isinstance(found, float) or found not in prompt.values:
        what = f"{found!r:.40} for {prompt.name} {prompt.version}, which is no verdict of it"
        raise PermanentInfraError(f"judge: {path} holds {what}; remove the file")


def make_judge(settings: JudgeSettings) -> Judge | None:
    """A judge where there are servers to ask or verdicts to read. ValueError: one is chosen (it has a model) and has neither."""
    chosen = f"a judge is chosen, {settings.model}; give the addresses of its servers, or its recorded verdicts (task.judge.cache)"
    require(bool(settings.urls or settings.cache or not settings.model), "task.judge.urls", settings.urls, chosen)
    return Judge(settings) if settings.urls or settings.cache else None


def cache_key(model: str, prompt: JudgePrompt, fields: Mapping[str, str], urls: Sequence[str]) -> str:
    """Of everything that a verdict depends on: what the judge reads, so that a prompt or a quotation that has changed is no trap."""
    words = [model, prompt.name, prompt.version, prompt.system, prompt.render(fields), list(urls)]
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=20).hexdigest()


def encode_data_url(picture: Picture) -> str:
    """JPEG of quality 85, transparency over white, the longest side at most MAX_IMAGE_SIDE."""
    shrink = min(1.0, MAX_IMAGE_SIDE / max(picture.size))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    picture = picture.convert("RGB")
    if shrink < 1:
        picture = picture.resize(tuple(max(min(side, MIN_IMAGE_SIDE), round(side * shrink)) for side in picture.size))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
