"""vLLM in this process: requests in, sampled tokens out, one step at a time. No asyncio, no ranks: those are rollout/local.py.

Token in, token out: the ids and the patches go to vLLM as they are, already expanded and already processed, so vLLM neither tokenizes nor
resizes nor hashes, and the trainer's patches are the engine's. Sampling is from the model at the temperature with the banned ids removed;
no top-p, no top-k, and the model folder's generation config has no say.

Read against vLLM 0.32.0: inputs/engine.py, v1/engine/llm_engine.py, v1/sample/logits_processor/interface.py. CUDA was never run.
"""

import logging
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_rl.config import EngineSettings, require
from megatron_rl.rollout.engine import ImageInput, Request, Sampling
from megatron_rl.rollout.vllm.sampler import SEED, EngineNoise, ban_and_seed, use_own_noise
from megatron_rl.rollout.vllm.weights import Weights, keep_weights_plain

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.inputs import EngineInput
    from vllm.multimodal.inputs import MultiModalKwargsItem

SHARED_MEMORY = Path("/dev/shm")
CACHED_PATCHES = 1 << 20
"""Of images kept between requests: 4.7 GB, in part shared with the Image they came from."""


def _prepare_environment(*, cuda: bool) -> None:
    """What vLLM reads from the environment when it is imported: offline, silent, in this process, threads left alone."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_DO_NOT_TRACK="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_USE_V2_MODEL_RUNNER="0",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    if not cuda:
        torch._dynamo.config.disable = True
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def _start_vllm(
    model_path: str, settings: EngineSettings, *, banned_ids: list[int], name: str, pixels: tuple[int, int] | None, reads_weights: bool
) -> "LLM":
    """Build vLLM's engine, leaving torch's number of threads to the caller (vLLM 0.32.0 v1/worker/cpu_worker.py takes it away)."""
    cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    require(not cuda or torch.cuda.is_available(), "engine.device", "cuda", "this machine has no CUDA device; use auto or cpu")
    _prepare_environment(cuda=cuda)
    set_num_threads = torch.set_num_threads
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm import LLM
        from vllm.platforms import current_platform

        built_for_cpu = current_platform.is_cpu()
        remedy = "is what the installed vllm-cpu serves" if built_for_cpu else "needs the package vllm-cpu; this vllm serves CUDA"
        require(built_for_cpu != cuda, "engine.device", "cuda" if cuda else "cpu", f"engine.device=cpu {remedy}")
        if not cuda:
            keep_weights_plain()
            name_shared_memory(name)
        try:
            arguments = engine_arguments(model_path, settings, cuda=cuda, pixels=pixels, reads_weights=reads_weights)
            llm = LLM(**arguments, logits_processors=[ban_and_seed(banned_ids)], use_tqdm_on_load=False)
        except ValueError as error:
            too_small = "KV cache is needed" in str(error)
            key, value = ("gpu_memory_utilization", settings.gpu_memory_utilization) if cuda else ("kv_cache_mib", settings.kv_cache_mib)
            require(not too_small, f"engine.{key}", value, f"too small for engine.max_model_len={settings.max_model_len}; raise it")
            raise
    torch.set_num_threads = set_num_threads
    for segment in SHARED_MEMORY.glob(f"{name}*"):  # every rank has it open now: nothing of it outlives them, however they end
        segment.unlink(missing_ok=True)
    return llm


def engine_arguments(
    model_path: str, settings: EngineSettings, *, cuda: bool, pixels: tuple[int, int] | None, reads_weights: bool
) -> dict[str, object]:
    """Arguments of vLLM's EngineArgs. pixels: the fewest and the most of a picture that will come; None takes the folder's own limits.

    vLLM 0.32.0 measures its largest step, and sizes the cache of pictures, by the largest picture that its own processor would make
    (model_executor/models/qwen2_vl.py, get_max_image_tokens). The released one makes 16,384 tokens of 12.8 megapixels, ours seldom do.
    """
    sizes = {"shortest_edge": pixels[0], "longest_edge": pixels[1]} if pixels else None
    return {
        "model": model_path,
        "dtype": settings.dtype,
        "load_format": "auto" if reads_weights else "dummy",
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "limit_mm_per_prompt": {"image": settings.max_images, "video": 0},
        "mm_processor_kwargs": {"size": sizes} if sizes else None,
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        **place_of(settings, cuda=cuda),
    }


def place_of(settings: EngineSettings, *, cuda: bool) -> dict[str, object]:
    """Arguments of LLM that say where it computes, and with how much memory.

    On CUDA an engine of one rank has the external launcher, too: it reads LOCAL_RANK. The other executor would put the engines of all of a
    node's ranks on cuda:0 (vLLM 0.32.0 v1/executor/uniproc_executor.py, _distributed_args).
    """
    launcher = {"tensor_parallel_size": settings.tp, "distributed_executor_backend": "external_launcher"}
    if cuda:
        return {"gpu_memory_utilization": settings.gpu_memory_utilization, "enable_sleep_mode": True, **launcher}
    host = {"kv_cache_memory_bytes": settings.kv_cache_mib << 20, "block_size": 32, "enforce_eager": True, "async_scheduling": False}
    return host | (launcher if settings.tp > 1 else {})


def name_shared_memory(name: str) -> None:
    """Let the ranks of this engine meet in shared memory of their own.

    vLLM 0.32.0 names it by the port of its init method, of which env:// has none: engines of several ranks on one machine would all meet
    in the same, and none would start beside another or after one that was killed (distributed/device_communicators/cpu_communicator.py).
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed

    def group_name(communicator: CpuCommunicator) -> str:
        return f"{name}-{communicator.unique_name}-{'-'.join(map(str, communicator.ranks))}"

    _CPUSHMDistributed.make_group_name = staticmethod(group_name)


class VllmCore:
    """vLLM's engine with this project's requests and weights. Every rank of an engine makes the same calls in the same order."""

    def __init__(
        self, model_path: str, settings: EngineSettings, *,
        banned_ids: list[int], stop_ids: list[int], name: str, pixels: tuple[int, int] | None, reads_weights: bool,
    ) -> None:  # fmt: skip
        """`name` is this engine's alone, the same on all its ranks. It has the folder's weights, or none before load_weights."""
        self._llm = _start_vllm(
            model_path, settings, banned_ids=banned_ids, name=name, pixels=pixels, reads_weights=reads_weights
        )  # fmt: skip
        self._engine = self._llm.llm_engine
        self._stop_ids = stop_ids
        self._items: OrderedDict[str, MultiModalKwargsItem] = OrderedDict()
        self._num_patches = 0
        runner = self._engine.model_executor.driver_worker.worker.model_runner
        self.weights = Weights(runner.get_model(), bucket_bytes=int(settings.bucket_mib * 2**20))
        self._cuda = runner.device.type == "cuda"
        self._noise = EngineNoise(runner) if self._cuda else None
        if not self._cuda:
            use_own_noise(runner)
        self.asleep: list[str] = []
        """What sleep has taken from the GPU and nothing has brought back yet: weights, kv_cache."""

    def is_busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    def known_images(self) -> set[str]:
        """Keys of the images whose patches need not be sent again."""
        return set(self._items)

    def add(self, request: Request) -> None:
        """Queue a request for the next step. Raises ValueError for what vLLM does not take."""
        from vllm.exceptions import VLLMValidationError

        if self._noise and not self.is_busy():
            self._noise.seed(request.sampling.seed)
        try:
            self._engine.add_request(request.id, self._engine_input(request), self._sampling_params(request.sampling))
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error

    def trim_images(self) -> None:
        """Forget the images used longest ago; once a step, so that every rank knows the same ones when the leader asks."""
        while self._num_patches > CACHED_PATCHES:
            _, oldest = self._items.popitem(last=False)
            self._num_patches -= int(oldest["image_grid_thw"].data.prod())

    def abort(self, request_ids: list[str]) -> None:
        self._engine.abort_request(request_ids)

    def step(self) -> list[tuple[str, list[int], list[float], bool]]:
        """One forward pass for all requests. Returns (id, token ids, logprobs, ended by a stop id or text) of those that have ended."""
        ended = []
        for output in self._engine.step():
            (sampled,) = output.outputs
            assert sampled.finish_reason in ("stop", "length"), f"request {output.request_id} ended by {sampled.finish_reason}"
            stopped = sampled.finish_reason == "stop"
            ended.append((output.request_id, list(sampled.token_ids), list(sampled.logprobs.logprobs), stopped))
        return ended

    def _engine_input(self, request: Request) -> "EngineInput":
        from vllm.inputs import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        if not request.images:
            return tokens_input(request.token_ids)
        items = [self._item(image) for image in request.images]
        ranges = [PlaceholderRange(offset=image.offset, length=image.num_tokens) for image in request.images]
        keys = [image.key for image in request.images]
        return mm_input(request.token_ids, MultiModalKwargsItems({"image": items}), {"image": keys}, {"image": ranges})

    def _item(self, image: ImageInput) -> "MultiModalKwargsItem":
        """The image in the fields of vLLM's model (model_executor/models/qwen2_vl.py::_create_qwen2vl_field_factory)."""
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        if image.key not in self._items:
            grid = torch.tensor([image.grid])
            patches = MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1))
            fields = {"pixel_values": patches, "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True)}
            inputs = {"pixel_values": image.patch_PC, "image_grid_thw": grid}
            (self._items[image.key],) = MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"]
            self._num_patches += math.prod(image.grid)
        self._items.move_to_end(image.key)
        return self._items[image.key]

    def _sampling_params(self, sampling: Sampling) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            extra_args={SEED: sampling.seed},
            stop_token_ids=list(self._stop_ids),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(sampling.stop),
            skip_clone=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights (weights.Weights.load) and forget what the old ones computed; wakes the weights' memory if it sleeps."""
        assert not self.is_busy(), "weights change between rollouts, not under them"
        if "weights" in self.asleep:
            self._engine.wake_up(["weights"])
        self.weights.load(tensors)
        self.asleep = [tag for tag in self.asleep if tag != "weights"]
        self._forget()

    def _forget(self) -> None:
        """Prefixes and image embeddings belong to the weights that computed them."""
        assert self._engine.reset_prefix_cache(), "the prefix cache is in use"
        self._engine.reset_mm_cache()
        self._engine.reset_encoder_cache()

    def sleep(self) -> None:
        """On CUDA discard weights and cache (vLLM's level 2: the next load_weights brings all of them); on a CPU empty the caches."""
        self._forget()
        if self._cuda:
            self._engine.sleep(level=2)
            self.asleep = ["weights", "kv_cache"]

    def wake(self) -> None:
        assert "weights" not in self.asleep, "load_weights before wake: sleep discarded them"
        if self.asleep:
            self._engine.wake_up(self.asleep)
            self.asleep = []

    def close(self) -> None:
        self._engine.engine_core.shutdown()
