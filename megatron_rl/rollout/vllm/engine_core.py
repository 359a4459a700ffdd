"""Runs vLLM in this process: adds requests and returns sampled tokens, one step at a time.

rollout/colocated.py adds asyncio and multi-rank support. vLLM receives expanded token ids and the
same image patches that the trainer uses, so vLLM does not tokenize, resize or hash anything. Tokens
are sampled from the model's full distribution at the sampling temperature, with the banned ids
removed. Top-p and top-k are not used, and the generation config in the model folder is ignored.

Written against vLLM 0.32.0: inputs/engine.py, v1/engine/llm_engine.py,
v1/sample/logits_processor/interface.py. Tested on one H100 with torch 2.11
(benchmarks/results/h100_2026-11-26.md).
"""

import logging
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from megatron_rl.compat.startup import paused_collector
from megatron_rl.config import EngineSettings, require
from megatron_rl.dtypes import dtype_name
from megatron_rl.rollout.engine import Completion, ImageInput, Request, SamplingSettings
from megatron_rl.rollout.vllm.kv_cache_errors import kv_cache_error
from megatron_rl.rollout.vllm.patch_cache import keep_covered_patches
from megatron_rl.rollout.vllm.sampler import BANNED_IDS_KEY, SEED_KEY, EngineNoise, make_logits_processor, use_seeded_noise
from megatron_rl.rollout.vllm.weight_receiver import EngineWeights, disable_weight_packing
from megatron_rl.types import SpecialTokens

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.inputs import EngineInput
    from vllm.logprobs import FlatLogprobs
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.outputs import RequestOutput

SHARED_MEMORY = Path("/dev/shm")
RECORDING_SCHEDULER = "megatron_rl.rollout.vllm.routed_experts.RecordingScheduler"
"""Value of vLLM's option scheduler_cls with which an engine records experts."""
CACHED_PATCHES = 1 << 20
"""Maximum number of image patches kept between requests. These patches take 4.9 GB for Qwen2.5-VL
and 6.4 GB for Qwen3-VL; part of this memory is shared with the `Image` objects.
"""


def _prepare_environment(*, cuda: bool) -> None:
    """Set the environment variables that vLLM reads when it is imported.

    vLLM then works offline, logs little, runs within this process, and does not bind threads to
    cores.
    """
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
    model_path: str, settings: EngineSettings, *,
    banned_ids: list[int], name: str, pixels: tuple[int, int] | None, reads_weights: bool, timeout_s: float,
) -> "LLM":  # fmt: skip
    """Build vLLM's engine.

    vLLM 0.32.0 replaces torch.set_num_threads (v1/worker/cpu_worker.py). This function restores the
    original, so that the caller controls the number of threads.
    """
    cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    require(not cuda or torch.cuda.is_available(), "engine.device", "cuda", "this machine has no CUDA device; use auto or cpu")
    _prepare_environment(cuda=cuda)
    set_num_threads = torch.set_num_threads
    with warnings.catch_warnings(), paused_collector():
        warnings.simplefilter("ignore")
        from vllm import LLM
        from vllm.platforms import current_platform

        built_for_cpu = current_platform.is_cpu()
        remedy = (
            "is required by the installed vllm-cpu"
            if built_for_cpu
            else "needs the package vllm-cpu; the installed vllm supports only CUDA"
        )
        require(built_for_cpu != cuda, "engine.device", "cuda" if cuda else "cpu", f"engine.device=cpu {remedy}")
        keep_covered_patches()
        if settings.return_routed_experts:
            from megatron_rl.rollout.vllm.routed_experts import install_recorder

            install_recorder()
        if not cuda:
            disable_weight_packing()
            set_shared_memory_name(name)
        try:
            arguments = engine_arguments(model_path, settings, cuda=cuda, pixels=pixels, reads_weights=reads_weights, timeout_s=timeout_s)
            own = {"logits_processors": [make_logits_processor()], "additional_config": {BANNED_IDS_KEY: banned_ids}}
            llm = LLM(**arguments, **own, use_tqdm_on_load=False)
        except ValueError as error:
            if misfit := kv_cache_error(str(error), settings, cuda=cuda):
                raise ValueError(misfit) from error
            raise
    torch.set_num_threads = set_num_threads
    for segment in SHARED_MEMORY.glob(f"{name}*"):  # every rank has it open, so it is freed once all ranks exit
        segment.unlink(missing_ok=True)
    return llm


def engine_arguments(
    model_path: str, settings: EngineSettings, *, cuda: bool, pixels: tuple[int, int] | None, reads_weights: bool, timeout_s: float
) -> dict[str, object]:
    """Return the arguments for vLLM's EngineArgs.

    To profile its largest step and to size the image cache, vLLM 0.32.0 uses the largest image that
    the processor config allows (model_executor/models/qwen2_vl.py, get_max_image_tokens). The
    processor config of released models allows 16,384 tokens (12.8 megapixels) per image, but most
    runs use smaller images.

    `pixels` is the (minimum, maximum) number of pixels of an image; if it is None, the limits in
    the model folder apply. `timeout_s` is the timeout of vLLM's process groups in seconds; vLLM's
    defaults are half an hour on CPUs and ten minutes on GPUs.
    """
    sizes = {"shortest_edge": pixels[0], "longest_edge": pixels[1]} if pixels else None
    return {
        "model": model_path,
        "dtype": dtype_name(settings.dtype),
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
        "distributed_timeout_seconds": math.ceil(timeout_s),
        "cpu_distributed_timeout_seconds": math.ceil(timeout_s),
        **device_arguments(settings, cuda=cuda),
        **({"scheduler_cls": RECORDING_SCHEDULER, "async_scheduling": False} if settings.return_routed_experts else {}),
    }


def device_arguments(settings: EngineSettings, *, cuda: bool) -> dict[str, object]:
    """Return the EngineArgs arguments that configure the device and its memory.

    On CUDA, even an engine with one rank uses the external launcher, which reads LOCAL_RANK. vLLM's
    uniproc executor would place the engines of all ranks of a node on cuda:0 (vLLM 0.32.0
    v1/executor/uniproc_executor.py, _distributed_args).
    """
    launcher = {"tensor_parallel_size": settings.tp, "distributed_executor_backend": "external_launcher"}
    if cuda:
        experts = {"moe_backend": "triton"}  # other backends reorder the experts, see expert_weights.py
        return {"gpu_memory_utilization": settings.gpu_memory_utilization, "enable_sleep_mode": True, **experts, **launcher}
    host = {"kv_cache_memory_bytes": settings.kv_cache_mib << 20, "block_size": 32, "enforce_eager": True, "async_scheduling": False}
    return host | (launcher if settings.tp > 1 else {})


def set_shared_memory_name(name: str) -> None:
    """Set a unique name for the shared-memory segment of this engine's ranks.

    vLLM 0.32.0 derives the segment's name from the port of the init method, and env:// has no port.
    Without a unique name, all multi-rank engines on a machine would use the same segment
    (distributed/device_communicators/cpu_communicator.py). In that case, an engine could not start
    while another engine is running, or after another engine was killed.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed

    def group_name(communicator: CpuCommunicator) -> str:
        return f"{name}-{communicator.unique_name}-{'-'.join(map(str, communicator.ranks))}"

    _CPUSHMDistributed.make_group_name = staticmethod(group_name)


class VllmCore:
    """vLLM engine that accepts this project's requests and weights.

    All ranks of an engine must make the same calls in the same order.
    """

    def __init__(
        self, model_path: str, settings: EngineSettings, *,
        special_tokens: SpecialTokens, name: str, pixels: tuple[int, int] | None, reads_weights: bool, timeout_s: float,
        version: int, cached_patches: int = CACHED_PATCHES,
    ) -> None:  # fmt: skip
        """Build the engine.

        If `reads_weights` is False, the engine has no weights until `load_weights` is called.
        `name` is a unique name for this engine, the same on all of its ranks.
        """
        self._llm = _start_vllm(
            model_path, settings, banned_ids=list(special_tokens.banned_ids), name=name, pixels=pixels, reads_weights=reads_weights,
            timeout_s=timeout_s,
        )  # fmt: skip
        self._engine = self._llm.llm_engine
        self._engine.set_weight_version(str(version))
        self._stop_ids = special_tokens.stop_ids
        self._items: OrderedDict[str, MultiModalKwargsItem] = OrderedDict()
        self._num_patches, self._max_cached_patches = 0, cached_patches
        runner = self._engine.model_executor.driver_worker.worker.model_runner
        self.weights = EngineWeights(runner.get_model(), bucket_bytes=int(settings.bucket_mib * 2**20))
        self._cuda = runner.device.type == "cuda"
        self._noise = EngineNoise(runner) if self._cuda else None
        if not self._cuda:
            use_seeded_noise(runner)
        self.sleeping_tags: list[str] = []
        """Tags (weights, kv_cache) of the GPU memory that `sleep` has freed and that has not been
        restored yet.
        """

    def is_busy(self) -> bool:
        """Return True if there are unfinished requests."""
        return self._engine.has_unfinished_requests()

    def known_images(self) -> set[str]:
        """Return the keys of the cached images, for which requests need not contain patches."""
        return set(self._items)

    def add(self, request: Request) -> None:
        """Queue a request for the next step.

        Raises:
            ValueError: vLLM rejects the request.
        """
        from vllm.exceptions import VLLMValidationError

        if self._noise and not self.is_busy():
            self._noise.seed(request.sampling.seed)
        try:
            self._engine.add_request(request.id, self._engine_input(request), self._sampling_params(request.sampling))
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error

    def trim_images(self) -> None:
        """Remove the least recently used images until the cache is within its limit.

        All ranks must call this method at the same point in a step, so that the ranks have the same
        images when the leader checks which images to send.
        """
        while self._num_patches > self._max_cached_patches:
            _, oldest = self._items.popitem(last=False)
            self._num_patches -= int(cast(torch.Tensor, oldest["image_grid_thw"].data).prod())

    def abort(self, request_ids: list[str]) -> None:
        """Abort the given requests."""
        self._engine.abort_request(request_ids)

    def step(self) -> list[tuple[str, Completion]]:
        """Run one step for all requests; return the id and completion of each request that ended.

        Completion.is_stopped is True if a request ended at a stop token or stop string.
        """
        ended = []
        for output in cast("list[RequestOutput]", self._engine.step()):
            (sampled,) = output.outputs
            assert sampled.finish_reason in ("stop", "length"), f"request {output.request_id} finished with reason {sampled.finish_reason}"
            token_ids, told = list(sampled.token_ids), list(cast("FlatLogprobs", sampled.logprobs).logprobs)
            each = len(told) // len(token_ids)  # logprobs per token: its own first, then the requested ids' (v1/sample/sampler.py)
            logprobs, asked = told[::each], [told[at + 1 : at + each] for at in range(0, len(told), each)] if each > 1 else []
            assert sampled.weight_versions is not None, "the engine has a weight version"
            versions = [int(span.version) for span in sampled.weight_versions for _ in range(span.start, span.end)]
            assert len(versions) == len(token_ids), f"weight versions for {len(versions)} tokens, but {len(token_ids)} tokens were sampled"
            experts = [] if sampled.routed_experts is None else [row.tobytes() for row in sampled.routed_experts]
            ended.append((output.request_id, Completion(token_ids, logprobs, sampled.finish_reason == "stop", versions, asked, experts)))
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
        """Return the cached image in vLLM's input format; cache the image if necessary.

        The fields match model_executor/models/qwen2_vl.py::_create_qwen2vl_field_factory.
        """
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        if image.key not in self._items:
            grid = torch.tensor([image.grid])
            patches = MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1))
            fields = {"pixel_values": patches, "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True)}
            inputs = {"pixel_values": image.patch_PC, "image_grid_thw": grid}
            (self._items[image.key],) = MultiModalKwargsItems.from_hf_inputs(cast(Any, inputs), fields)["image"]
            self._num_patches += math.prod(image.grid)
        self._items.move_to_end(image.key)
        return self._items[image.key]

    def _sampling_params(self, sampling: SamplingSettings) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            extra_args={SEED_KEY: sampling.seed},
            stop_token_ids=list(self._stop_ids),
            ignore_eos=True,
            logprobs=None if sampling.logprob_token_ids else 0,
            logprob_token_ids=list(sampling.logprob_token_ids) or None,
            flat_logprobs=True,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(sampling.stop),
            skip_clone=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            routed_experts_prompt_start=sampling.routed_experts_start,
        )

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Replace the weights (EngineWeights.load) and clear the caches that depend on them.

        If `sleep` has freed the memory of the weights, this memory is restored first. Requests in
        progress keep their sampled tokens and weight versions, and continue with the new weights.
        """
        if "weights" in self.sleeping_tags:
            self._engine.wake_up(["weights"])
        self.weights.load(tensors)
        self.sleeping_tags = [tag for tag in self.sleeping_tags if tag != "weights"]
        self._reset_caches()
        self._engine.set_weight_version(str(version))

    def _reset_caches(self) -> None:
        """Clear the cached prefixes and image embeddings, which depend on the weights.

        Requests in progress lose their KV cache. vLLM preempts them, as if it had run out of
        memory, and recomputes their prompts and sampled tokens (vLLM 0.32.0,
        v1/core/sched/scheduler.py, reset_prefix_cache). On CPUs, preemption does not change the
        sampling noise, which depends only on seed and position (sampler.py).
        """
        assert self._engine.reset_prefix_cache(reset_running_requests=True), "the prefix cache is in use"
        self._engine.reset_mm_cache()
        self._engine.reset_encoder_cache()

    def sleep(self) -> None:
        """Free memory for the trainer.

        On CUDA, this method discards the weights and the KV cache (sleep level 2 of vLLM), because
        the next load_weights sends all weights. On a CPU, this method clears the caches. The image
        cache is emptied, because the trainer prepares its own patches. Requests in progress keep
        their patches.

        Until its next step, vLLM's worker keeps the patches of the requests that ended last. An
        idle engine therefore runs one more step, as vLLM's own loop does (0.32.0 v1/engine/core.py,
        EngineCoreProc.has_work).
        """
        if not self.is_busy():
            self._engine.step()
        self._items.clear()
        self._num_patches = 0
        self._reset_caches()
        if self._cuda:
            self._engine.sleep(level=2, mode="keep")
            self.sleeping_tags = ["weights", "kv_cache"]

    def wake(self) -> None:
        """Restore the memory of the KV cache; after `sleep` on CUDA, call `load_weights` first."""
        assert "weights" not in self.sleeping_tags, "load_weights must be called before wake: sleep discarded the weights"
        if self.sleeping_tags:
            self._engine.wake_up(self.sleeping_tags)
            self.sleeping_tags = []

    def close(self) -> None:
        """Shut vLLM down."""
        self._engine.engine_core.shutdown()
