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
from megatron_rl.clients.openai import ChatMessage, Completion, api_key, make_client, translate_errors
from megatron_rl.config import JudgeSettings
from megatron_rl.config.checks import require
from megatron_rl.errors import PermanentInfraError
from megatron_rl.rewards.judge_prompt import JudgePrompt, Malformed
from megatron_rl.rewards.verdict_cache import Verdicts
from megatron_rl.types import JudgeResult, Rollout

LONGEST_SIDE, SHORTEST_SIDE = 1024, 28
"""Pixels of a picture that a judge is shown; a larger one is shrunk, no side below what Qwen2.5-VL takes for one patch."""


WORDS = 500
"""Characters that are kept of what a judge thought."""
REMEMBERED = 10_000
"""Verdicts whose words are there for who asks the same again."""
Said = tuple[float, str]
"""A verdict, and the words before it."""


class Judge:
    """Counts of its work: `counts`, and those of `servers`."""

    def __init__(self, settings: JudgeSettings, *, rest_s: float = 0.5) -> None:
        require(bool(settings.urls or settings.model), "task.judge.model", settings.model, "recorded verdicts are kept by model; name it")
        self.settings = settings
        self.model, self.always_ask = settings.model, settings.always_ask
        self.servers = EndpointPool(
            settings.urls, name="judge", max_attempts=settings.max_attempts, timeout_s=settings.timeout_s,
            outage_timeout_s=settings.outage_timeout_s, concurrency=settings.concurrency, rest_s=rest_s,
        )  # fmt: skip
        self.num_called = self.cache_hits = 0
        """Verdicts that a server gave; verdicts that were kept, or that another request under way brought."""
        self._clients: dict[str, openai.AsyncOpenAI] = {}
        self._secret = ""
        """The servers' key, from `start` on."""
        self._refuses_schemas: set[str] = set()
        """Servers that have refused a JSON schema and gone on without."""
        self._asked: dict[str, asyncio.Task[Said]] = {}
        self._words: dict[str, str] = {}
        """By the key of a verdict, where there were some."""
        self._verdicts: Verdicts | None = None
        """From `start` on."""

    async def start(self) -> None:
        """Connect in the running event loop. InfraError: no server answers, or none serves the model. Where only some do, a line says
        so."""
        self._verdicts = Verdicts(self.settings.cache, read_only=not self.settings.urls)
        self.servers.start()
        self._secret = api_key(self.settings.token_file)
        for url in dict.fromkeys(self.settings.urls):
            self._clients[url] = make_client(url, secret=self._secret)  # `servers` hold it to its time
        warning = health_warning(
            await check_endpoints(self._clients, model=self.model, secret=self._secret, token_file=self.settings.token_file)
        )
        if warning:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        self.model = self.model or await self.servers.ask(self._served_model)

    async def close(self) -> None:
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        self._clients.clear()
        if self._verdicts is not None:
            self._verdicts.close()

    def counts(self) -> dict[str, int]:
        """Return what this process has asked (observe/judge_stats.py)."""
        return {"called": self.num_called, "cached": self.cache_hits, "failed": self.servers.failures}

    async def judged(
        self, rollout: Rollout, prompt: JudgePrompt, *, fields: Mapping[str, str], images: Sequence[Picture] = (), turn: int | None = None
    ) -> float:  # fmt: skip
        """What is `said`, which the rollout keeps: of this turn, or of the whole."""
        clock = asyncio.get_running_loop().time
        asked = clock()
        value, words = await self.said(prompt, fields=fields, images=images)
        said = JudgeResult(
            judge=self.model, prompt=f"{prompt.name} {prompt.version}", value=value, turn=turn, wall_s=clock() - asked, reasoning=words
        )
        if said not in rollout.verdicts:  # by another part of the reward
            rollout.verdicts.append(said)
            rollout.verdicts.sort(key=lambda each: (each.turn is None, each.turn or 0, each.prompt))  # whoever answered first
        return value

    async def verdict(self, prompt: JudgePrompt, *, fields: Mapping[str, str], images: Sequence[Picture] = ()) -> float:
        """`said`, without the words."""
        return (await self.said(prompt, fields=fields, images=images))[0]

    async def said(self, prompt: JudgePrompt, *, fields: Mapping[str, str], images: Sequence[Picture] = ()) -> Said:
        """Raises InfraError, naming server and reason, after the last try."""
        urls = await asyncio.to_thread(lambda: [data_url(picture) for picture in images])
        key = key_of(self.model, prompt, fields, urls)
        found = self._verdicts.find(key)
        self.cache_hits += found is not None or key in self._asked
        if found is not None:
            require_verdict(found, prompt, path=self.settings.cache)
            return found, self._words.get(key, "")
        if not self._clients:
            raise PermanentInfraError(
                f"judge: {self.settings.cache} holds no verdict of {prompt.name} {prompt.version} by {self.model} on {fields}"
            )
        if key not in self._asked:
            self._asked[key] = asyncio.create_task(self._ask(key, prompt, fields, urls))
            self._asked[key].add_done_callback(lambda _: self._asked.pop(key))
        return await asyncio.shield(self._asked[key])  # one who is no longer interested takes nothing from the others

    async def _ask(self, key: str, prompt: JudgePrompt, fields: Mapping[str, str], urls: list[str]) -> Said:
        text = prompt.text(fields)
        parts = [{"type": "text", "text": text}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
        messages = [{"role": "system", "content": prompt.system}, {"role": "user", "content": parts if urls else text}]
        verdict, words = await self.servers.ask(lambda endpoint: self._answer(endpoint, prompt, messages))
        self.num_called += 1
        self._verdicts.keep(
            key, model=self.model, prompt=f"{prompt.name} {prompt.version}", fields=json.dumps(dict(fields)), verdict=verdict
        )
        if words:
            self._words[key] = words
            if len(self._words) > REMEMBERED:
                del self._words[next(iter(self._words))]
        return verdict, words

    async def _answer(self, endpoint: Endpoint, prompt: JudgePrompt, messages: list[dict[str, object]]) -> Said:
        wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": prompt.schema}}
        if endpoint.url not in self._refuses_schemas:
            try:
                return said_in(await self._complete(endpoint, messages, response_format=wanted), prompt, secret=self._secret)
            except RequestRejected:
                reply = await self._complete(endpoint, messages)
                self._refuses_schemas.add(endpoint.url)  # what it refused was the schema
                return said_in(reply, prompt, secret=self._secret)
        return said_in(await self._complete(endpoint, messages), prompt, secret=self._secret)

    async def _complete(self, endpoint: Endpoint, messages: list[dict[str, object]], **options: object) -> ChatMessage:
        with translate_errors(self._secret, token_file=self.settings.token_file):
            raw = await self._clients[endpoint.url].chat.completions.with_raw_response.create(
                model=self.model,
                messages=messages,
                temperature=self.settings.temperature,
                max_completion_tokens=self.settings.max_tokens,
                **options,
            )
            return Completion.model_validate_json(raw.content).choices[0].message

    async def _served_model(self, endpoint: Endpoint) -> str:
        with translate_errors(self._secret, token_file=self.settings.token_file):
            return (await list_models(self._clients[endpoint.url]))[0]


def said_in(message: ChatMessage, prompt: JudgePrompt, *, secret: str) -> Said:
    """Malformed: there is no verdict in it. Words are without a secret that the server repeated."""
    words = message.thoughts.replace(secret, "***") if secret else message.thoughts
    return verdict_of(message.content, prompt, secret=secret), words[:WORDS]


def verdict_of(reply: str, prompt: JudgePrompt, *, secret: str) -> float:
    """Malformed: see JudgePrompt.read; a secret that the server repeated is not told."""
    try:
        return prompt.read(reply)
    except Malformed:
        if not secret:
            raise
        return prompt.read(reply.replace(secret, "***"))  # no verdict either: told without the secret


def require_verdict(found: object, prompt: JudgePrompt, *, path: str) -> None:
    """PermanentInfraError: a file of verdicts holds something that this prompt's judge can never have said."""
    if not isinstance(found, float) or found not in prompt.values:
        what = f"{found!r:.40} for {prompt.name} {prompt.version}, which is no verdict of it"
        raise PermanentInfraError(f"judge: {path} holds {what}; remove the file")


def judge_of(settings: JudgeSettings) -> Judge | None:
    """A judge where there are servers to ask or verdicts to read. ValueError: one is chosen (it has a model) and has neither."""
    chosen = f"a judge is chosen, {settings.model}; give the addresses of its servers, or its recorded verdicts (task.judge.cache)"
    require(bool(settings.urls or settings.cache or not settings.model), "task.judge.urls", settings.urls, chosen)
    return Judge(settings) if settings.urls or settings.cache else None


def key_of(model: str, prompt: JudgePrompt, fields: Mapping[str, str], urls: Sequence[str]) -> str:
    """Of everything that a verdict depends on: what the judge reads, so that a prompt or a quotation that has changed is no trap."""
    words = [model, prompt.name, prompt.version, prompt.system, prompt.text(fields), list(urls)]
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=20).hexdigest()


def data_url(picture: Picture) -> str:
    """JPEG of quality 85, transparency over white, the longest side at most LONGEST_SIDE."""
    shrink = min(1.0, LONGEST_SIDE / max(picture.size))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    picture = picture.convert("RGB")
    if shrink < 1:
        picture = picture.resize(tuple(max(min(side, SHORTEST_SIDE), round(side * shrink)) for side in picture.size))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
