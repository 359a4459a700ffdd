"""Imports the packages that a run loads, in the environment of an engine, for
tests/support/fork_server.py.

This project's own modules are removed again, so that each process imports them itself; a test may
change a module before this import.
"""

import atexit
import gc
import importlib
import os
import sys
import warnings

gc.disable()
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as in the CLI
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron_rl.rollout.vllm.engine_core import _prepare_environment

    _prepare_environment(cuda=False)
    for name in (
        "compressed_tensors", "gymnasium", "httpx", "hydra._internal.core_plugins.basic_launcher",
        "matplotlib.figure", "megatron.core.dist_checkpointing.strategies.fully_parallel",
        "megatron.core.dist_checkpointing.strategies.torch", "megatron.core.distributed",
        "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer",
        "megatron.core.pipeline_parallel", "openai", "pyarrow.parquet", "rich.progress",
        "tensorboard.summary.writer", "torch.profiler", "torchvision.transforms.v2",
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
        "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
        "vllm.distributed.device_communicators.cpu_communicator",
        "vllm.distributed.elastic_ep.elastic_execute", "vllm.entrypoints.launchers.cli_args",
        "vllm.entrypoints.llm", "vllm.lora.resolver",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.model_executor.models.qwen2_5_vl", "vllm.plugins.lora_resolvers.filesystem_resolver",
        "vllm.plugins.lora_resolvers.hf_hub_resolver", "vllm.v1.attention.backends.cpu_attn",
        "vllm.v1.core.sched.scheduler", "vllm.v1.engine.llm_engine", "vllm.v1.pool.flash_maxsim",
        "vllm.v1.worker.cpu_worker",
    ):  # fmt: skip
        importlib.import_module(name)
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING
    from vllm.platforms import current_platform

    VIDEO_PROCESSOR_MAPPING.values()  # AutoProcessor imports all of them
    current_platform.register_triton_kernel_overrides()
    from wandb.sdk.data_types._private import MEDIA_TMP
for name in [name for name in sys.modules if name.partition(".")[0] == "megatron_rl"]:
    del sys.modules[name]
gc.collect()
gc.freeze()
gc.enable()


def _skip() -> None:
    """Do nothing, in place of what this module has done once for all children."""


# vLLM unfreezes and collects all objects when an engine closes, and its registration of kernels
# scans every name of every module when an engine starts.
gc.unfreeze = _skip
type(current_platform).register_triton_kernel_overrides = staticmethod(_skip)


def _detach_media_folder() -> None:
    """Keep the child from removing wandb's media folder (wandb is imported by megatron.core), which
    the parent removes at its exit.
    """
    atexit.unregister(MEDIA_TMP.cleanup)
    MEDIA_TMP._finalizer.detach()


os.register_at_fork(after_in_child=_detach_media_folder)
