"""Translates vLLM's KV-cache errors into errors about this project's settings."""

import math
import re

from megatron_rl.config import EngineSettings


def kv_cache_error(message: str, settings: EngineSettings, *, cuda: bool) -> str:
    """Return the error message for a KV-cache error of vLLM 0.32.0, or '' for any other error.

    vLLM raises these errors in v1/core/kv_cache_utils.py and v1/worker/cpu_worker.py.
    """
    key, value = ("gpu_memory_utilization", settings.gpu_memory_utilization) if cuda else ("kv_cache_mib", settings.kv_cache_mib)
    needed = re.search(r"([\d.]+) GiB KV cache is needed", message)
    if needed:  # vLLM rounds this size to a hundredth of a GiB
        least = math.ceil((float(needed[1]) + 0.005) * 1024)
        remedy = f"raise it until the cache has {least} MiB" if cuda else f"raise it to {least}"
        return f"engine.{key}={value}: too small for engine.max_model_len={settings.max_model_len}; {remedy}, or lower the latter"
    free = re.search(r"Available memory on node .*?\(([\d.]+)/", message)
    if free:
        return f"engine.{key}={value}: exceeds the {float(free[1]) * 1024:.0f} MiB of free memory; lower it"
    return ""
