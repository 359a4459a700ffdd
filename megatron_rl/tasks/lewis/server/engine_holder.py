"""Runs a vLLM engine in a separate thread, so that the server's event loop stays responsive."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import torch

from megatron_rl.config import EngineSettings, ModelSettings
from megatron_rl.errors import InfraError
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.lewis.server.model_version import compute_folder_version, compute_tensors_version
from megatron_rl.tasks.lewis.server.read_write_lock import ReadWriteLock
from megatron_rl.types import TokenSequence

T = TypeVar("T")
RENDERER_CACHE_BYTES, ENGINE_CACHE_PATCHES = 1 << 28, 1 << 15
"""Size of the renderer's image cache in bytes, and size of the engine's image cache in patches.
Together, the two caches take 0.4 GB; the caches of a training run take 6 GB.
"""


class EngineHolder:
    """Inference engine of a server process, with the model weights and their version.

    The engine cannot be used after `close`.
    """

    def __init__(self, model: ModelSettings, settings: EngineSettings) -> None:
        """Load the model.

        The weight files are read twice: once to compute their hash, and once to load them.

        Raises:
            ValueError: The model does not exist, or the settings are not valid for the model.
        """
        self.renderer, self.settings = Renderer(model, cache_bytes=RENDERER_CACHE_BYTES), settings
        self._version_fields = (model.min_pixels, model.max_pixels, settings.dtype)
        self.version = compute_folder_version(Path(model.path), *self._version_fields)
        self._weights_lock, self._has_weights = ReadWriteLock(), True
        renderer = self.renderer
        self._engine = ColocatedEngine(
            model.path, settings, special_tokens=renderer.special_tokens,
            group=None, pixels=renderer.final_pixels, cached_patches=ENGINE_CACHE_PATCHES,
        )  # fmt: skip
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._is_started.wait()

    def _run(self) -> None:
        self._engine.run(self._run_until_closed())

    async def _run_until_closed(self) -> None:
        self._loop, self._close_event = asyncio.get_running_loop(), asyncio.Event()
        self._is_started.set()
        await self._close_event.wait()

    @property
    def is_healthy(self) -> bool:
        """True if the engine is running and its weights are loaded."""
        return self._thread.is_alive() and self._has_weights

    @property
    def busy_s(self) -> float:
        """Total time in seconds during which the engine has been busy."""
        return self._engine.busy_s

    async def run_in_renderer(self, function: Callable[[], T]) -> T:
        """Run `function` in one of the renderer's threads and return its result."""
        return await self.renderer.run_in_thread(function)

    async def generate(self, context: TokenSequence, sampling: SamplingSettings) -> Completion:
        """Generate a completion. Cancelling this coroutine also stops the engine's computation.

        Raises:
            ValueError: The prompt does not fit into the engine's sequence length.
            InfraError: The engine has failed.
        """
        longest, length = self.settings.max_model_len, len(context.token_ids)
        if length >= longest:
            raise ValueError(f"the prompt has {length} tokens including the image, but the model accepts at most {longest - 1}")
        if not self.is_healthy:
            raise InfraError("the engine has failed; restart the server")
        asked = asyncio.run_coroutine_threadsafe(self._engine.generate(context.token_ids, context.images, sampling), self._loop)
        return await asyncio.wrap_future(asked)

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that `load_weights` requires, keyed by tensor name.

        The names are the newer names of Hugging Face checkpoints (models/name_mapping.py).
        """
        return self._engine.shapes

    @asynccontextmanager
    async def hold_weights(self) -> AsyncIterator[str]:
        """Prevent weight updates inside the block, and yield the version of the weights."""
        async with self._weights_lock.read_lock():
            yield self.version

    async def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Wait for requests in progress to finish, then replace all weights of the model.

        Raises:
            InfraError: Loading failed. The engine is unhealthy until a later call succeeds.
        """
        version = await asyncio.to_thread(compute_tensors_version, tensors, *self._version_fields)
        async with self._weights_lock.write_lock():
            taken = False
            try:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._load_into_engine(tensors), self._loop))
                self.version, taken = version, True
            except RuntimeError as error:
                raise InfraError(f"the engine failed to load the weights ({error})") from error
            finally:
                self._has_weights = taken

    async def _load_into_engine(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._engine.load_weights(iter(tensors.items()), version=self._engine.weight_version + 1)

    def close(self) -> None:
        """Stop the engine and its thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._close_event.set)
        self._thread.join()
        self._engine.close()
