"""Assumptions of policy/ and memory_plan/ about megatron-core 0.16.1 that only a GPU would
exercise, checked in its source code. test_vllm.py does the same for vLLM.

Behavior that also runs on a CPU is tested by running it, in tests/policy and tests/distributed.
"""

import ast
import importlib.util
import inspect
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from tests.contracts.test_vllm import calls, in_order

MEGATRON = Path(importlib.util.find_spec("megatron").submodule_search_locations[0]) / "core"


@cache
def source(path: str) -> str:
    return (MEGATRON / path).read_text()


def function(path: str, name: str) -> ast.FunctionDef:
    """Return the syntax tree of `name` or `Class.name` in a file of Megatron."""
    found: ast.AST = ast.parse(source(path))
    for part in name.split("."):
        (found,) = [node for node in found.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
    return found


@pytest.mark.known_failure("upgrade-changes-results")
def test_the_version_that_was_read() -> None:
    """The assumptions were checked for this version; after an upgrade, check all of this module
    again.
    """
    assert version("megatron-core") == "0.16.1"


def test_one_queue_orders_gathers_and_products() -> None:
    """cli/__init__.py: sequence parallelism relies on CUDA_DEVICE_MAX_CONNECTIONS=1 in its backward
    pass.
    """
    backward = function("tensor_parallel/layers.py", "LinearWithGradAccumulationAndAsyncCommunication.backward")
    in_order(calls(backward), "dist_all_gather_func", "grad_output.matmul", "handle.wait", "dist_reduce_scatter_func")
    text = source("tensor_parallel/layers.py").splitlines()[backward.lineno : backward.end_lineno]
    assert sum("we rely on CUDA_DEVICE_MAX_CONNECTIONS=1" in line for line in text) == 3


def test_gradients_leave_without_a_copy_and_their_memory_is_given_back() -> None:
    """policy/offload.py: gradient memory is free before the engine wakes up, and no gradient is
    copied to the host.
    """
    leaves = inspect.signature(DistributedDataParallel.offload_grad_buffers).parameters
    assert leaves["empty_cache"].default is leaves["synchronize"].default is True
    in_order(
        calls(function("distributed/distributed_data_parallel.py", "DistributedDataParallel.offload_grad_buffers")),
        "cuda.synchronize", "offload_to_cpu", "cuda.empty_cache",
    )  # fmt: skip
    buffer = function("distributed/param_and_grad_buffer.py", "_ParamAndGradBuffer.offload_to_cpu")
    (gradients,) = [node for node in buffer.body if isinstance(node, ast.If) and "move_grads" in ast.unparse(node.test)]
    assert [ast.unparse(node) for node in gradients.body][-1] == "self.grad_data.storage().resize_(0)"
    assert not [name for name in calls(gradients) if name.endswith((".cpu", ".copy_", ".clone"))]


def test_packed_sequences_ask_the_device_where_plain_ones_do_not() -> None:
    """policy/attention.py, PackedCoreAttention: packed tokens are passed to Megatron's rotary
    embedding as one sequence, because the packed variant synchronizes with the device.
    """
    packed, plain = (function("models/common/embeddings/rope_utils.py", f"_apply_rotary_pos_emb_{how}") for how in ("thd", "bshd"))
    assert [name for name in calls(packed) if name.endswith((".tolist", ".item"))]
    assert not [name for name in calls(plain) if name.endswith((".tolist", ".item", ".cpu", ".nonzero"))]
    chosen = function("models/common/embeddings/rope_utils.py", "apply_rotary_pos_emb")
    (last,) = [node for node in chosen.body if isinstance(node, ast.If) and ast.unparse(node.test) == "cu_seqlens is None"]
    assert [name for node in last.body for name in calls(node)] == ["_apply_rotary_pos_emb_bshd"]


def test_positions_are_multiplied_on_the_device() -> None:
    """policy/load_model.py: the model is built on the host and moved to the device. The rotary
    frequencies are not a buffer of a module and are created on the device.
    """
    made = function("models/common/embeddings/rotary_pos_embedding.py", "MultimodalRotaryEmbedding.__init__")
    assert "device=torch.cuda.current_device()" in ast.unparse(made)


def test_an_optimizer_on_the_host_takes_every_parameter_of_a_gpu() -> None:
    """memory_plan/gpu_memory.py and memory_plan/host_memory.py: the main weights stay on the GPU,
    and the optimizer steps pinned host copies of all of them. tests/policy replaces the code
    checked here with stand-ins.
    """
    parted = ast.unparse(function("optimizer/cpu_offloading/hybrid_optimizer.py", "HybridDeviceOptimizer._get_sub_optimizer_param_groups"))
    assert "offload_threshold = gpu_params_total_numel * offload_fraction" in parted
    assert "if offload_params_numel < offload_threshold and param.is_cuda" in parted
    assert "param.detach().clone().cpu().pin_memory()" in parted
    assert "shard_main_param = shard_model_param.clone().float()" in source("optimizer/distrib_optimizer.py")


def test_nobody_else_looks_for_numbers_that_are_none() -> None:
    """policy/loss_metrics.py checks for non-finite values between the gradient norm and the step,
    because Megatron by default applies non-finite gradients.
    """
    assert DistributedDataParallelConfig().check_for_nan_in_grad is False


def test_groups_have_both_backends() -> None:
    """distributed/world.py: a group created without a backend inherits "cpu:gloo,cuda:nccl", so
    objects and images are sent with gloo.
    """
    made = function("parallel_state.py", "create_group")
    defaults = dict(zip([argument.arg for argument in made.args.args], made.args.defaults, strict=True))
    assert ast.unparse(defaults["backend"]) == "None" and "'backend': backend" in ast.unparse(made)
