"""Imports the packages that a run loads, in the environment of an engine, for
tests/support/fork_server.py.

This project's own modules are removed again, so that each process imports them itself; a test may
change a module before this import.
"""

import atexit
import importlib
import os
import sys
import warnings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as in the CLI
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron_rl.rollout.vllm.engine_core import _prepare_environment

    _prepare_environment(cuda=False)
    for name in (
        "gymnasium", "hydra", "matplotlib.figure", "megatron.core.distributed", "megatron.core.models.gpt", "megatron.core.optimizer",
        "megatron.core.pipeline_parallel", "openai", "pyarrow.parquet", "tensorboard.summary.writer", "torchvision.transforms.v2",
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
        "vllm.entrypoints.llm", "vllm.model_executor.models.qwen2_5_vl", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker",
    ):  # fmt: skip
        importlib.import_module(name)
    from wandb.sdk.data_types._private import MEDIA_TMP
for name in [name for name in sys.modules if name.partition(".")[0] == "megatron_rl"]:
    del sys.modules[name]


def _detach_media_folder() -> None:
    """Keep the child from removing wandb's media folder (wandb is imported by megatron.core), which
    the parent removes at its exit.
    """
    atexit.unregister(MEDIA_TMP.cleanup)
    MEDIA_TMP._finalizer.detach()


os.register_at_fork(after_in_child=_detach_media_folder)
