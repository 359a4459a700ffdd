"""Prints vLLM's configuration of every GPU recipe on a machine without a GPU, one line of JSON per
recipe. Run by tests/memory_plan/test_engine_memory.py.

    cuda_config.py FOLDER RECIPE...

FOLDER contains a nano model, whose tokenizer and processor are used. The first recipe gets a second
line, with a vLLM that does not know this trainer's image sizes.

The platform that vLLM has detected, a CPU, is replaced by a CUDA platform that reports the name,
memory and compute capability of the recipe's GPU. Nothing is started and no weights are read. The
model folder contains a released config.json and the processor's released limit of 12.8 megapixels.
"""

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0",
    VLLM_LOGGING_LEVEL="CRITICAL", RANK="5", LOCAL_RANK="5", WORLD_SIZE="8",
)  # fmt: skip
for library in ("vllm._C", "vllm._C_stable_libtorch"):  # CUDA kernels, which no configuration needs
    if importlib.util.find_spec(library) is None:
        sys.modules[library] = types.ModuleType(library)

import vllm.model_executor.models.qwen2_5_vl  # noqa: E402 (before the platform is replaced: a CUDA platform needs its kernels)
import vllm.model_executor.models.qwen3_5  # noqa: E402
import vllm.model_executor.models.qwen3_vl_moe  # noqa: E402, F401
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.multimodal import MULTIMODAL_REGISTRY  # noqa: E402
from vllm.multimodal.encoder_budget import MultiModalBudget  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402

from megatron_rl.memory_plan.gpu_specs import GPU_SPECS  # noqa: E402
from megatron_rl.models.known_models import HUB_IDS, make_released_config  # noqa: E402
from megatron_rl.rollout.vllm.engine_core import engine_arguments  # noqa: E402
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint  # noqa: E402
from tests.contracts.test_configs import settings_of  # noqa: E402

RELEASED_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
"""Image size limits of the processor of every released Qwen2.5-VL."""
MODELS = ("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen3.5-9B")
"""Models of the recipes."""
CAPABILITY = {"l4": (8, 9), "l40s": (8, 9), "a100": (8, 0), "h100": (9, 0), "h200": (9, 0)}


def patch_platform(name: str) -> None:
    """Make vLLM's platform report this GPU."""

    class Pretended(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*CAPABILITY[name])

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return GPU_SPECS[name].memory_bytes

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return f"NVIDIA {name.upper()}"

        @classmethod
        def is_cumem_allocator_available(cls) -> bool:
            return True

        @classmethod
        def is_sleep_mode_available(cls) -> bool:
            return True

    current_platform.__class__ = Pretended


def make_model_folder(nano: Path, model: str, out: Path) -> Path:
    """Create a folder of a released model without weights, with the released config, the released
    image size limits of Qwen2.5-VL, and the tokenizer of the nano model.
    """
    family, size = HUB_IDS[model]
    if family != "qwen2_5_vl":
        nano = out.with_name(family)
        make_checkpoint(nano, family=family)
    shutil.copytree(nano, out, ignore=shutil.ignore_patterns("*.safetensors"))
    (out / "config.json").write_text(json.dumps(make_released_config(size, family=family)))
    processor = json.loads((out / "processor_config.json").read_text())
    processor["image_processor"]["size"] = RELEASED_PIXELS
    (out / "processor_config.json").write_text(json.dumps(processor))
    return out


def describe_engine_config(folder: Path, recipe: str, *, is_ours: bool) -> dict[str, object]:
    """Return vLLM's configuration for a recipe.

    With `is_ours`, vLLM receives this trainer's image size limits.
    """
    settings = settings_of(f"experiment={recipe}")
    patch_platform(settings.plan.gpu)
    pixels = (settings.model.min_pixels, settings.model.max_pixels) if is_ours else None
    arguments = engine_arguments(str(folder), settings.engine, cuda=True, pixels=pixels, reads_weights=False, timeout_s=600.0)
    made = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    pictures = MultiModalBudget(made, MULTIMODAL_REGISTRY)
    profiled = pictures.get_dummy_encoder_profile_inputs("image", 1)[0][1]
    return {
        "recipe": recipe, "is_ours": is_ours,
        "batched": made.scheduler_config.max_num_batched_tokens, "sequences": made.scheduler_config.max_num_seqs,
        "async": made.scheduler_config.async_scheduling, "length": made.model_config.max_model_len,
        "share": made.cache_config.gpu_memory_utilization, "prefix_caching": made.cache_config.enable_prefix_caching,
        "cumem": made.model_config.enable_cumem_allocator, "graphs_leave": made.use_cumem_cudagraph_pool,
        "graphs": made.compilation_config.cudagraph_mode.name, "v2": made.use_v2_model_runner,
        "tp": made.parallel_config.tensor_parallel_size, "launcher": made.parallel_config.distributed_executor_backend,
        "picture": pictures.mm_max_toks_per_item, "pictures": pictures.mm_max_items_per_batch, "cache": pictures.encoder_cache_size,
        "patches": list(profiled["pixel_values"].data.shape), "load": str(made.load_config.load_format),
        "logprobs": made.model_config.logprobs_mode, "dtype": str(made.model_config.dtype),
    }  # fmt: skip


def main() -> None:
    like, *recipes = sys.argv[1:]
    with tempfile.TemporaryDirectory() as place:
        folders = {model: make_model_folder(Path(like), model, Path(place) / HUB_IDS[model][1]) for model in MODELS}
        for recipe in recipes:
            folder = folders[settings_of(f"experiment={recipe}").model.path]
            for is_ours in (True, False) if recipe == recipes[0] else (True,):
                print(json.dumps(describe_engine_config(folder, recipe, is_ours=is_ours)), flush=True)


if __name__ == "__main__":
    main()
