"""Compiles the Triton kernels of a run for capabilities 9.0 and 8.9, on a machine without a GPU.

    python benchmarks/cuda_kernels.py        # with the packages of requirements/gpu.txt

Needs a library libcuda.so.1 in LD_LIBRARY_PATH, which may be a stub: vLLM's modules link to it. A
stand-in for Triton's driver names the GPU, so that Triton and torch.compile do what they do on it,
up to the binary (cubin); nothing is launched. torch.compile receives FakeTensors of type cuda. The
shapes are those of Qwen2.5-VL-7B. Prints one line per kernel and fails if one is not compiled.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo.device_interface
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

if TYPE_CHECKING:  # only with the packages for GPUs
    from triton.backends.compiler import GPUTarget

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise vLLM replaces Triton, because no driver is active

CAPABILITIES, TIMEOUT_S = (90, 89), 900
TOKENS, ROWS, VOCAB, WIDTH = 4096, 1024, 152064, 18944
HEADS, KV_HEADS, HEAD_SIZE, VISION_HEADS, VISION_HEAD_SIZE = 28, 4, 128, 16, 80
PROPERTIES = SimpleNamespace(
    name="stand-in", multi_processor_count=132, warp_size=32, total_memory=141 * 10**9, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, shared_memory_per_block_optin=101376, max_threads_per_block=1024, L2_cache_size=50 << 20,
)  # fmt: skip


class Driver:
    """Stand-in for Triton's driver of a GPU with this capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.get_current_device, self.get_current_stream = lambda: 0, lambda _: 0

    def get_current_target(self) -> GPUTarget:
        """Return the GPU to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        """Return the device of tensors."""
        return torch.device("cuda", 0)

    def get_device_interface(self) -> object:
        """Return torch's functions of the device."""
        return torch.cuda


compiled: dict[str, int] = {}
"""Size of the binary of each kernel in bytes, for the capability in use."""


@contextmanager
def use_gpu(capability: int) -> Iterator[None]:
    """Let Triton and torch.compile find a GPU of this capability; record the sizes of binaries."""
    import triton.compiler
    import triton.runtime.jit
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    compile_kernel, run = triton.compile, triton.runtime.jit.JITFunction.run
    PROPERTIES.major, PROPERTIES.minor = divmod(capability, 10)

    def record(source, *arguments, **options):  # noqa: ANN001, ANN002, ANN003, ANN202
        made = compile_kernel(source, *arguments, **options)
        assert made.metadata.target.arch == capability
        compiled[f"{made.metadata.name} {len(compiled)}"] = len(made.asm["cubin"])
        return made

    replaced: list[tuple[object, str, Callable]] = [
        (triton, "compile", record),
        (triton.compiler, "compile", record),  # what a JIT function imports before its first call
        (triton.runtime.jit.JITFunction, "run", lambda self, *a, grid, warmup, **k: run(self, *a, grid=grid, warmup=True, **k)),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (triton_heuristics.CachingAutotuner, "_make_launchers", lambda self: None),
        (triton_heuristics.CachingAutotuner, "_dynamic_scale_rblock", lambda self: None),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "_get_device_properties", lambda device: PROPERTIES),
        (torch.cuda, "get_device_capability", lambda device=None: divmod(capability, 10)),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "_exchange_device", lambda device: 0),
        (torch.cuda, "_maybe_exchange_device", lambda device: 0),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "get_rng_state", lambda device=None: torch.zeros(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda state, device=None: None),
    ]
    triton.runtime.driver.set_active(Driver(capability))
    with ExitStack() as patches:
        for owner, name, made in replaced:
            patches.enter_context(mock.patch.object(owner, name, made, create=True))
        yield


def run_vllm_kernels() -> None:
    """Call vLLM's Triton kernels that these models use; the calls compile and do not launch."""
    from vllm.model_executor.layers.rotary_embedding.mrope import triton_mrope
    from vllm.v1.worker.block_table import ComputeSlotMappingKernel
    from vllm.vllm_flash_attn.ops.triton.rotary import apply_rotary

    bf16 = {"dtype": torch.bfloat16}
    q, k = torch.zeros(TOKENS, HEADS * HEAD_SIZE, **bf16), torch.zeros(TOKENS, KV_HEADS * HEAD_SIZE, **bf16)
    angles = torch.zeros(3, TOKENS, HEAD_SIZE // 2, **bf16)
    triton_mrope(q, k, angles, angles, [16, 24, 24], HEAD_SIZE, HEAD_SIZE, False, True)
    of_image = torch.zeros(1, TOKENS, VISION_HEADS, VISION_HEAD_SIZE, **bf16)
    half = torch.zeros(TOKENS, VISION_HEAD_SIZE // 2, **bf16)
    with mock.patch.object(torch.cuda, "device", mock.MagicMock()):
        apply_rotary(of_image, half, half)
    table = ComputeSlotMappingKernel()
    table(
        8, 8, 8192, torch.zeros(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int64), torch.zeros(256, 1024, dtype=torch.int32), 1024,
        torch.zeros(8192, dtype=torch.int64), 16, 1, 0, 1,
    )  # fmt: skip


def graphs() -> Iterator[tuple[str, Callable, list]]:
    """Yield the functions that a run compiles with torch.compile, with inputs on FakeTensors."""
    from megatron.core.fusions.fused_bias_swiglu import swiglu, swiglu_back

    from megatron_rl.policy import fused, logprobs

    bf16 = {"dtype": torch.bfloat16}
    q, k = torch.empty(TOKENS, HEADS, HEAD_SIZE, **bf16), torch.empty(TOKENS, KV_HEADS, HEAD_SIZE, **bf16)
    angles = torch.empty(TOKENS, HEAD_SIZE, **bf16)
    yield "_rotate", fused._rotate, [q, k, angles, angles]
    both, gradient = torch.empty(TOKENS, 2 * WIDTH, **bf16), torch.empty(TOKENS, WIDTH, **bf16)
    yield "swiglu", swiglu, [both]
    yield "swiglu_back", swiglu_back, [gradient, both]
    logits, banned = torch.empty(ROWS, VOCAB, **bf16), torch.empty(VOCAB, dtype=torch.bool)
    number_R, place_R = torch.empty(ROWS), torch.empty(ROWS, dtype=torch.int64)
    peak, sums, of_logits = logprobs._EAGER
    yield "_row_peak", lambda x, b: peak(x, b, 1.0), [logits, banned]
    yield "_row_sums", lambda x, b, p, at: sums(x, b, 1.0, p, at), [logits, banned, number_R, place_R]
    yield "_logit_gradient", lambda x, b, n, at: of_logits(x, b, 1.0, n, n, at, n, n), [logits, banned, number_R, place_R]


def as_graph(function: Callable) -> Callable[..., tuple]:
    """Return the function without torch.compile, with a tuple of outputs."""
    plain = getattr(function, "_torchdynamo_orig_callable", function)

    def run(*inputs: torch.Tensor) -> tuple:
        made = plain(*inputs)
        return made if isinstance(made, tuple) else (made,)

    return run


def compile_graphs() -> None:
    """Compile each function as torch.compile does after tracing it.

    It is traced on the CPU, because some operators of a CUDA build ask for the driver before they
    look for FakeTensors; then all tensors of the graph are on "cuda".
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for name, function, inputs in graphs():
            before = len(compiled)
            traced = make_fx(as_graph(function), decomposition_table=select_decomp_table())(*inputs)
            for node in traced.graph.nodes:
                node.kwargs = {key: torch.device("cuda", 0) if key == "device" else value for key, value in node.kwargs.items()}
                node.meta.pop("val", None)
            traced.recompile()
            on_gpu = [
                FakeTensor(mode, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), torch.device("cuda", 0))
                for x in inputs
            ]
            FakeTensorProp(traced, mode).propagate_dont_convert_inputs(*on_gpu)
            compile_fx_inner(traced, on_gpu)
            assert len(compiled) > before, f"{name}: no kernel was compiled"
            print(f"  {name}: {len(compiled) - before} kernels")


def main() -> None:
    """Compile for the capability that is given, or for both, each in a process of its own.

    torch keeps the properties of a device for the whole process.
    """
    parser = argparse.ArgumentParser(description="Compile the Triton kernels of a run without a GPU.")
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, help="capability to compile for (default: all)")
    capability = parser.parse_args().capability
    if capability is None:
        for each in CAPABILITIES:
            subprocess.run([sys.executable, __file__, "--capability", str(each)], check=True, timeout=TIMEOUT_S)
        return
    with use_gpu(capability):
        run_vllm_kernels()
        print(f"sm_{capability}: {len(compiled)} kernels of vLLM")
        compile_graphs()
    for name, size in compiled.items():
        print(f"sm_{capability} {name.rpartition(' ')[0]}: {size} bytes")


if __name__ == "__main__":
    main()
