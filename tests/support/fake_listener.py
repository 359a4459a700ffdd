"""The listener's own application with a fake engine whose probabilities are known: p(yes) is a hash
of the image's pixels and the question.

    fake_listener.py PORT [--version V] [--delay-s S]

As a script, it is a server that prints its address and runs until it receives a signal.
"""

import argparse
import asyncio
import hashlib
import math
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL.Image import Image as Picture

from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.tasks.lewis.server.image_cache import ImageCache
from megatron_rl.tasks.lewis.server.listener_app import ListenerService, create_app
from megatron_rl.tasks.lewis.server.request_limiter import RequestLimits
from megatron_rl.tasks.lewis.server.weight_updates import WeightUpdateHandler
from megatron_rl_sandbox.connections import ConnectionRegistry
from megatron_rl_sandbox.http import open_listener, serve_until_signal


def yes_probability(picture: Picture, question: str) -> float:
    digest = hashlib.blake2b(picture.convert("RGB").tobytes() + question.encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "big") + 1) / (2**32 + 2)


class Tokenizer:
    words = (" Yes", "maybe", "NO", "yes\n")

    def __len__(self) -> int:
        return len(self.words)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[each] for each in ids)


class Renderer:
    tokenizer = Tokenizer()

    def prompt(self, messages: Sequence[Any]) -> SimpleNamespace:
        image, text = messages[0]["content"]
        key = hashlib.sha256(image["image"].tobytes()).hexdigest()
        return SimpleNamespace(images=[SimpleNamespace(key=key)], p=yes_probability(image["image"], text["text"]), question=text["text"])


@dataclass
class FakeEngineHolder:
    """An engine holder without an engine. It splits the probability of yes between two tokens."""

    version: str = "one"
    delay_s: float = 0.0
    logprobs_fn: Callable[[float], list[float]] = lambda p: [math.log(p / 4), math.log(1 - p), math.log(3 * p / 4)]
    renderer: Renderer = field(default_factory=Renderer)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(image key, question) of each request, in order."""
    is_healthy: bool = True
    busy_s: float = 0.0

    async def run_in_renderer(self, act: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(act)

    @asynccontextmanager
    async def hold_weights(self) -> AsyncIterator[str]:
        yield self.version

    async def generate(self, context: Any, sampling: SamplingSettings) -> Completion:
        self.requests.append((context.images[0].key, context.question))
        assert sampling.logprob_token_ids == (0, 3, 2) and sampling.max_tokens == 1 and sampling.temperature == 1.0
        await asyncio.sleep(self.delay_s)
        yes, no, more = self.logprobs_fn(context.p)
        return Completion([0], [0.0], is_stopped=False, weight_versions=[0], requested_logprobs=[[yes, more, no]])


def build_app(
    engine: FakeEngineHolder,
    *roots: Path,
    token: str = "",
    cache_bytes: int = 1 << 30,
    log: Path | None = None,
    receives_weights: bool = False,
    **limits: Any,
) -> Any:
    pictures = ImageCache([str(root) for root in roots], cache_bytes=cache_bytes)
    receiver = WeightUpdateHandler(engine) if receives_weights else None
    return create_app(
        ListenerService(engine, pictures, limits=RequestLimits(**limits), name="scripted", log=log), token=token, receiver=receiver
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--version", default="one")
    parser.add_argument("--delay-s", type=float, default=0.0)
    given = parser.parse_args()
    with open_listener("127.0.0.1", given.port, token="", permits="ask") as place:
        application = build_app(FakeEngineHolder(version=given.version, delay_s=given.delay_s), concurrency=32)
        sys.exit(asyncio.run(serve_until_signal(application, place, registry=ConnectionRegistry())))
