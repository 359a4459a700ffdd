"""Rollout engine that runs vLLM in the trainer's processes, on one or more ranks.

`run(main)` runs an asyncio event loop, in which episodes await `generate`. A background task runs
vLLM. In each iteration, the task adds the episodes' new requests, runs one vLLM step for all
requests (continuous batching), wakes the episodes whose turn has finished, and yields to the event
loop. A slow tool therefore delays only its own episode.

An engine that spans several ranks (settings.tp > 1, vLLM's external launcher) has a vLLM scheduler
on each rank. Only the leader, rank 0 of the engine's group, runs `main`. Before each step, the
leader broadcasts new and aborted requests; every rank then runs the step.
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
from megatron_rl.types import Image, SpecialTokens

T = TypeVar("T")
_LOOP_ITERATIONS = 3
"""Number of event-loop iterations between two vLLM steps. When a rendering thread has finished, the
episode that started the thread receives the result after two iterations, and the other episodes of
the group receive it after three iterations.
"""
HEARTBEAT_S = 20.0
"""Maximum number of seconds between two messages from an idle leader. This interval is well below
the timeout of any collective.
"""


def _common_name(group: dist.ProcessGroup | None) -> str:
    """Return a name that is unique to this engine and identical on all of its ranks."""
    names = [uuid.uuid4().hex]
    if group is not None:
        dist.broadcast_object_list(names, group_src=0, group=group)
    return names[0]


@dataclass(slots=True)
class _StepMessage:
    """Message that the leader broadcasts to the followers before a step."""

    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    stop: bool = False
    error: str = ""

    def __bool__(self) -> bool:
        return bool(self.requests or self.aborted or self.stop)


class ColocatedEngine:
    """vLLM engine on the ranks of `group`, or on this rank alone if `group` is None.

    All ranks of the default process group must construct their engines at the same time, because
    vLLM creates its process groups over all of these ranks. Only `special_tokens.stop_ids` and a
    request's stop strings end a turn; the generation config in the model folder is ignored.
    """

    def __init__(
        self,
        model_path: str,
        settings: EngineSettings,
        *,
        special_tokens: SpecialTokens,
        group: dist.ProcessGroup | None,
        weight_version: int = 0,
        pixels: tuple[int, int] | None = None,
        reads_weights: bool = True,
        timeout_s: float = 600.0,
        cached_patches: int = CACHED_PATCHES,
    ) -> None:
        """Build the engine.

        If `reads_weights` is False, the engine starts faster, but can generate only after the first
        `load_weights` call. `pixels` is the (minimum, maximum) number of pixels of an image; if it
        is None, the limits of the model folder's processor apply. `timeout_s` is the timeout in
        seconds of the process groups that vLLM creates. `cached_patches` is the maximum number of
        image patches to keep between requests.
        """
        assert settings.tp == (1 if group is None else group.size()), "engine.tp must equal the size of the group"
        self._settings = settings
        self._image_token_id = special_tokens.image_token_id
        self._group = group
        self._core = VllmCore(
            model_path, settings, special_tokens=special_tokens, name=_common_name(group), pixels=pixels,
            reads_weights=reads_weights, timeout_s=timeout_s, version=weight_version,
            cached_patches=cached_patches,
        )  # fmt: skip
        self._has_weights = reads_weights
        self.weight_version = weight_version
        self.busy_s = 0.0
        """Seconds spent on adding requests and running vLLM steps since construction."""
        self._ids = itertools.count()
        self._pending_message = _StepMessage()
        self._delayed: list[Request] = []
        """Requests with the same prompt as another request in this step. These requests start one
        step later, when vLLM's prefix cache contains the prompt, so that the prompt is computed
        only once.
        """
        self._wake_event = asyncio.Event()
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._error: BaseException | None = None
        self._loop = asyncio.Runner(loop_factory=PausableEventLoop)
        """Event loop of the engine. All calls of `run` use the same loop, because shared sandboxes,
        judges and unfinished episodes are bound to it.
        """

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        """Sample one response that continues `token_ids`.

        `token_ids` contains one image_token_id for each vision token. For a sequence that has
        already reached max_model_len, `generate` returns an empty completion with is_stopped=False.
        Cancelling the coroutine aborts the request.

        Raises:
            RuntimeError: The placeholders do not match the images.
            ValueError: vLLM rejects the request, for example because the temperature is above 2.
            PermanentInfraError: The engine has failed.
        """
        if self._error is not None:
            raise PermanentInfraError(f"the engine has failed: {self._error!r}")
        assert self._has_weights, "load_weights must be called before generate: the engine has no weights"
        assert not self._core.sleeping_tags, f"generate was called while {self._core.sleeping_tags} are asleep"
        limit = self._settings.max_images
        require(len(images) <= limit, "engine.max_images", limit, f"a sequence contains {len(images)} images; raise this limit")
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
        """Run `main` on the leader and return its result; followers return None.

        Followers run the same vLLM steps as the leader. If `main` raises, the leader re-raises the
        exception and the followers raise RuntimeError. If a vLLM step fails, all pending `generate`
        calls fail. Tasks that `main` leaves running continue in the next `run` (see
        RolloutEngine.run).
        """
        if self._group is not None and self._group.rank() != 0:
            main.close()
            self._run_as_follower()
            return None
        return self._loop.run(self._run_as_leader(main))

    def run_alone(self, main: Coroutine[object, object, T]) -> T | None:
        """Run `main` on the leader without its followers; `main` must not use the engine.

        The followers return None immediately.
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
                failure = pump.exception()
                assert failure is not None, "the pump ends only by an error"
                self._fail(failure)
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
        """Broadcast the leader's pending message to all ranks of the engine and return it."""
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
        """Replace the weights in place and clear the caches computed with the old weights.

        vllm/weight_receiver.py verifies that every tensor arrives exactly once. On a sleeping CUDA
        engine, this method restores the memory for the weights, but not the memory for the KV
        cache. Turns in progress continue with the new weights.
        """
        self._core.load_weights(tensors, version=version)
        self._has_weights, self.weight_version = True, version

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that `load_weights` requires, keyed by tensor name.

        The names follow the naming scheme of newer Hugging Face checkpoints.
        """
        return self._core.weights.shapes

    def sleep(self) -> None:
        """Free memory for the trainer.

        On CUDA, the memory of the weights is freed, because the next weight sync sends all weights.
        """
        self._core.sleep()

    def wake(self) -> None:
        """Restore the KV cache's memory; after `sleep` on CUDA, call `load_weights` first."""
        self._core.wake()

    def metrics(self) -> dict[str, float]:
        """Return an empty dict, because this engine has no metrics."""
        return {}

    def close(self) -> None:
        """Shut vLLM down.

        vLLM also destroys the default process group, so `close` must be the last call in a process.
        """
        self._loop.close()
        self._core.close()
