"""Rollout engine in this process: vLLM behind `await generate(...)`, on one rank or several.

`run(main)` drives an asyncio loop. Episodes await `generate`. A pump task adds their requests,
steps vLLM once for all of them (continuous batching), wakes the episodes with finished turns, and
yields to the loop, so that a slow tool delays only its own episode.

An engine that spans several ranks (settings.tp > 1, vLLM's external launcher) has a scheduler on
each of them. Only the leader, rank 0 of the engine's group, runs `main`. Before each step it
broadcasts new and aborted requests, and then every rank steps.
"""

import asyncio
import contextlib
import itertools
import pickle
import time
import uuid
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_rl.config import EngineSettings, require
from megatron_rl.errors import PermanentInfraError
from megatron_rl.rollout.engine import Completion, ImageInput, Request, SamplingSettings, placeholder_offsets
from megatron_rl.rollout.event_loop import PausableEventLoop
from megatron_rl.rollout.vllm.engine_core import CACHED_PATCHES, VllmCore
from megatron_rl.types import Image

T = TypeVar("T")
_LOOP_ITERATIONS = 3
"""Number of event-loop iterations between two steps. The result of a rendering thread takes two
iterations to reach its episode, and one more to reach the others of its group.
"""
HEARTBEAT_S = 20.0
"""Maximum seconds between an idle leader's messages, well within any collective's timeout."""


def _common_name(group: dist.ProcessGroup | None) -> str:
    """Return a name that no other engine has, the same on all ranks of this one."""
    names = [uuid.uuid4().hex]
    if group is not None:
        dist.broadcast_object_list(names, group_src=0, group=group)
    return names[0]


@dataclass(slots=True)
class _StepMessage:
    """Message of the leader to the followers before a step."""

    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    stop: bool = False
    error: str = ""

    def __bool__(self) -> bool:
        return bool(self.requests or self.aborted or self.stop)


class ColocatedEngine:
    """One vLLM engine that spans the ranks of `group` (None: this process alone).

    Every rank of the default process group constructs its engine at the same time, because vLLM
    creates its groups over all of them. `banned_ids` have no probability and are never sampled.
    Only `stop_ids` and a request's stop strings end a turn; the model folder's generation config is
    ignored.
    """

    def __init__(
        self,
        model_path: str,
        settings: EngineSettings,
        *,
        image_token_id: int,
        banned_ids: list[int],
        stop_ids: list[int],
        group: dist.ProcessGroup | None,
        weight_version: int = 0,
        pixels: tuple[int, int] | None = None,
        reads_weights: bool = True,
        timeout_s: float = 600.0,
        cached_patches: int = CACHED_PATCHES,
    ) -> None:
        """Build the engine.

        Without `reads_weights` the engine starts faster and generates only after the first
        `load_weights`. `pixels` are the minimum and maximum number of pixels of an image; None
        takes the limits of the folder's processor. `timeout_s` is the timeout of vLLM's process
        groups, which all ranks create together. `cached_patches` is the number of image patches
        kept between requests.
        """
        assert settings.tp == (1 if group is None else group.size()), "an engine spans the ranks of its group"
        self._settings = settings
        self._image_token_id = image_token_id
        self._group = group
        self._core = VllmCore(
            model_path, settings, banned_ids=banned_ids, stop_ids=stop_ids, name=_common_name(group), pixels=pixels,
            reads_weights=reads_weights, timeout_s=timeout_s, version=weight_version,
            cached_patches=cached_patches,
        )  # fmt: skip
        self._has_weights = reads_weights
        self.weight_version = weight_version
        self.busy_s = 0.0
        """Seconds spent preparing requests and in vLLM's steps since construction."""
        self._ids = itertools.count()
        self._pending_message = _StepMessage()
        self._delayed: list[Request] = []
        """Requests with the same prompt as another request of this step. They start one step later,
        when vLLM's prefix cache has the prompt, which is then computed only once.
        """
        self._wake_event = asyncio.Event()
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._error: BaseException | None = None
        self._loop = asyncio.Runner(loop_factory=PausableEventLoop)
        """Event loop of the engine, kept from one `run` to the next: shared sandboxes and judges,
        and unfinished episodes, depend on it.
        """

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        """Sample one turn after `token_ids`.

        `token_ids` has one image_token_id for each vision token. A sequence at max_model_len
        returns an empty completion that is not stopped. Cancelling the coroutine aborts the
        request.

        Raises:
            RuntimeError: The placeholders do not match the images.
            ValueError: vLLM rejects the request, for example a temperature above 2.
            PermanentInfraError: The engine has failed.
        """
        if self._error is not None:
            raise PermanentInfraError(f"the engine has failed: {self._error!r}")
        assert self._has_weights, "generate before load_weights: this engine has read none"
        assert not self._core.sleeping_tags, f"generate while {self._core.sleeping_tags} asleep"
        limit = self._settings.max_images
        require(len(images) <= limit, "engine.max_images", limit, f"a context holds {len(images)} images; raise it")
        offsets = placeholder_offsets(token_ids, images, image_token_id=self._image_token_id)
        if len(token_ids) >= self._settings.max_model_len:
            return Completion([], [], is_stopped=False, weight_versions=[])
        shown = [
            ImageInput(image.key, image.grid, offset, image.num_tokens, image.patch_PC)
            for image, offset in zip(images, offsets, strict=True)
        ]
        request = Request(str(next(self._ids)), token_ids, shown, sampling)
        future = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._pending_message.requests.append(request)
        self._wake_event.set()
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(request.id, None) is not None:
                self._pending_message.aborted.append(request.id)
                self._wake_event.set()
            raise

    def run(self, main: Coroutine[object, object, T]) -> T | None:
        """Run `main` on the leader and return its result; followers step with it and return None.

        An exception of `main` is raised here, and the followers raise RuntimeError. A failing step
        fails every waiting `generate`. Tasks that `main` leaves behind continue in the next run
        (engine.RolloutEngine).
        """
        if self._group is not None and self._group.rank() != 0:
            main.close()
            self._run_as_follower()
            return None
        return self._loop.run(self._run_as_leader(main))

    def run_alone(self, main: Coroutine[object, object, T]) -> T | None:
        """Run `main`, which must not use the engine, on the leader without its followers.

        The followers return None at once.
        """
        if self._group is not None and self._group.rank() != 0:
            main.close()
            return None
        return self._loop.run(main)

    async def _run_as_leader(self, main: Coroutine[object, object, T]) -> T:
        self._wake_event = asyncio.Event()
        episodes = asyncio.create_task(main)
        pump = asyncio.create_task(self._pump())
        try:
            await asyncio.wait({episodes, pump}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                self._fail(pump.exception())
            return await episodes
        finally:
            pump.cancel()
            error = self._error
            if error is None:
                ended = episodes.done() and not episodes.cancelled()
                error = episodes.exception() if ended else KeyboardInterrupt("interrupted")
            if error is not None:
                self._pending_message.aborted += self._waiting
                self._waiting.clear()
            self._pending_message = replace(self._pending_message, stop=True, error="" if error is None else repr(error))
            self._add_requests(self._broadcast_message())

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._pending_message = _StepMessage()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(PermanentInfraError(f"the engine has failed: {error!r}"))

    async def _pump(self) -> None:
        while True:
            if not (self._pending_message or self._delayed or self._core.is_busy()):
                self._wake_event.clear()
                with contextlib.suppress(TimeoutError):  # Python 3.11's wait_for ignores a cancellation that comes with the event
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._wake_event.wait()
            self._run_step()
            for _ in range(_LOOP_ITERATIONS):
                await asyncio.sleep(0)

    def _run_as_follower(self) -> None:
        while True:
            news = self._run_step()
            if news.error:
                raise RuntimeError(f"the engine's leader failed: {news.error}")
            if news.stop:
                return

    def _run_step(self) -> _StepMessage:
        """Run one step, on every rank: exchange the message, add and abort requests, compute."""
        news = self._broadcast_message()
        started = time.perf_counter()
        self._add_requests(news)
        if self._core.is_busy() and not news.stop and not self._core.sleeping_tags:
            for request_id, completion in self._core.step():
                future = self._waiting.pop(request_id, None)
                if future is not None and not future.done():
                    future.set_result(completion)
        self.busy_s += time.perf_counter() - started
        return news

    def _broadcast_message(self) -> _StepMessage:
        """Return the message of this step.

        The leader of several ranks broadcasts its pending message; a follower receives it.
        """
        news, self._pending_message = self._pending_message, _StepMessage()
        if self._group is None:
            return news
        leads = self._group.rank() == 0
        payload = torch.empty(0, dtype=torch.uint8)
        if leads and news:
            known = self._core.known_images()
            for request in news.requests:
                request.images[:] = [replace(image, patch_PC=None) if image.key in known else image for image in request.images]
                known.update(image.key for image in request.images)
            payload = torch.frombuffer(bytearray(pickle.dumps(news)), dtype=torch.uint8)
        length = torch.tensor([payload.numel()])
        dist.broadcast(length, group=self._group, group_src=0)
        if length.item():
            payload = payload if leads else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(payload, group=self._group, group_src=0)
            news = news if leads else pickle.loads(payload.numpy().tobytes())
        return news

    def _add_requests(self, message: _StepMessage) -> None:
        if self._error is not None:
            return
        held, self._delayed = self._delayed, []
        seen: set[tuple] = set()
        for request in message.requests:
            prompt = (*request.token_ids, *(image.key for image in request.images))
            (self._delayed if prompt in seen and not message.stop else held).append(request)
            seen.add(prompt)
        for request in held:
            if request.id not in message.aborted:
                self._add(request)
        self._core.abort(message.aborted)
        self._delayed = [request for request in self._delayed if request.id not in message.aborted]
        if not self._delayed:  # delayed requests may need patches that came with another request
            self._core.trim_images()

    def _add(self, request: Request) -> None:
        try:
            self._core.add(request)
        except ValueError as error:
            future = self._waiting.pop(request.id, None)
            if future is not None and not future.done():
                future.set_exception(error)

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Replace the weights in place and discard everything that the old ones computed.

        It is verified that every tensor arrives exactly once (vllm/weight_receiver.py). On a
        sleeping CUDA engine this restores the memory of the weights, not yet that of the cache.
        Turns in progress continue with the new weights.
        """
        self._core.load_weights(tensors, version=version)
        self._has_weights, self.weight_version = True, version

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that `load_weights` takes, by name.

        The names are in the newer spelling of Hugging Face checkpoints.
        """
        return self._core.weights.shapes

    def sleep(self) -> None:
        """Free memory for the trainer.

        On CUDA (not tested on hardware yet) the weights are discarded too, since every step sends
        all of them.
        """
        self._core.sleep()

    def wake(self) -> None:
        """Restore the cache's memory; after `sleep` on CUDA, call `load_weights` first."""
        self._core.wake()

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def close(self) -> None:
        """Shut vLLM down.

        vLLM also destroys the default process group, so this must be the last call of a process.
        """
        self._loop.close()
        self._core.close()
