"""The model families that this trainer knows: a row each, whose content is a file of its own."""

from collections.abc import Mapping

from megatron_rl.models.model_spec import ModelFamily
from megatron_rl.models.qwen2_5_vl import QWEN2_5_VL
from megatron_rl.models.qwen2_vl import QWEN2_VL
from megatron_rl.models.qwen3_vl import QWEN3_VL

FAMILIES: Mapping[str, ModelFamily] = {"qwen2_5_vl": QWEN2_5_VL, "qwen2_vl": QWEN2_VL, "qwen3_vl": QWEN3_VL}
"""By model_type of config.json."""
PROCESSORS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
IMAGE_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""Names of transformers' classes (5.19) that cut pictures as the three families do."""
