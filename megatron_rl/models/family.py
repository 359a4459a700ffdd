"""Table of the supported model families; each family is defined in its own module."""

from collections.abc import Mapping

from megatron_rl.models.model_spec import ModelFamily
from megatron_rl.models.qwen2_5_vl import QWEN2_5_VL
from megatron_rl.models.qwen2_vl import QWEN2_VL
from megatron_rl.models.qwen3_5 import QWEN3_5
from megatron_rl.models.qwen3_5_moe import QWEN3_5_MOE
from megatron_rl.models.qwen3_vl import QWEN3_VL
from megatron_rl.models.qwen3_vl_moe import QWEN3_VL_MOE

FAMILIES: Mapping[str, ModelFamily] = {
    "qwen2_5_vl": QWEN2_5_VL, "qwen2_vl": QWEN2_VL, "qwen3_vl": QWEN3_VL, "qwen3_vl_moe": QWEN3_VL_MOE,
    "qwen3_5": QWEN3_5, "qwen3_5_moe": QWEN3_5_MOE,
}  # fmt: skip
"""Model families, keyed by the model_type in config.json."""
PROCESSORS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
IMAGE_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""Names of transformers' image processor classes (5.19) that split images into patches as the
families require.
"""
