"""Tests that vLLM 0.32.0's KV-cache errors are translated into this project's settings. The error
texts are the ones that vLLM raised on this project's machines.
"""

import re
from pathlib import Path

import vllm

from megatron_rl.config import EngineSettings
from megatron_rl.rollout.vllm.kv_cache_errors import kv_cache_error

SMALL = (
    "To serve at least one request with the models's max seq len (1024), (0.31 GiB KV cache is needed, which is larger than the available "
    "KV cache memory (0.0 GiB). Based on the available memory, the estimated maximum model length is 0."
)
LARGE = (
    "Available memory on node 0 (12.50/23.50 GiB) on kv cache allocation is less than requested memory for kv (9000.00 GiB). "
    "Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
)


def test_too_small_says_to_what() -> None:
    """The error recommends 323 MiB: 0.31 GiB may be a rounded 0.315 GiB, which is 322.56 MiB."""
    settings = EngineSettings(kv_cache_mib=1, max_model_len=1024)
    said = "engine.kv_cache_mib=1: too small for engine.max_model_len=1024; raise it to 323, or lower the latter"
    assert kv_cache_error(SMALL, settings, cuda=False) == said
    assert kv_cache_error(SMALL, settings, cuda=True).startswith("engine.gpu_memory_utilization=")


def test_too_large_names_our_setting() -> None:
    said = "engine.kv_cache_mib=9216000: exceeds the 12800 MiB of free memory; lower it"
    assert kv_cache_error(LARGE, EngineSettings(kv_cache_mib=9216000), cuda=False) == said
    assert kv_cache_error("anything else", EngineSettings(), cuda=False) == ""


def test_vllm_still_says_so() -> None:
    folder = Path(vllm.__file__).parent / "v1"
    text = (folder / "core" / "kv_cache_utils.py").read_text() + (folder / "worker" / "cpu_worker.py").read_text()
    assert re.search(r"GiB KV[^a-z]*f?\Wcache is needed", text) and "Available memory on node" in text
