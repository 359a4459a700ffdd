"""Qwen2.5-VL's row: rotary positions against Hugging Face, its parts and adapters against the names of a real model."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

from megatron_rl.config.model import PARTS
from megatron_rl.models.qwen2_5_vl import QWEN2_5_VL, mrope_positions
from megatron_rl.models.released import known_spec
from megatron_rl.types import Image

PAD = 9


def image(rows: int, columns: int, *, merge: int = 2) -> Image:
    return Image(picture=Pillow.new("RGB", (1, 1)), patch_PC=None, grid=(1, rows * merge, columns * merge), key="a", merge=merge)


def test_placeholders_must_match_the_images() -> None:
    with pytest.raises(ValueError, match="placeholders"):
        mrope_positions([1, PAD, 2], [image(1, 2)], PAD)
    with pytest.raises(ValueError, match="placeholders"):
        mrope_positions([1, 2], [image(1, 1)], PAD)
    with pytest.raises(ValueError, match="placeholders"):
        mrope_positions([1, PAD, 2], [], PAD)


def model_of(merge: int) -> type:
    """What get_rope_index needs of its model."""
    text = {
        "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 16, "spatial_merge_size": merge}

    class WithConfig:
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=PAD)
        get_vision_position_ids = staticmethod(lambda *args, **kwargs: Qwen2_5_VLModel.get_vision_position_ids(None, *args, **kwargs))

    return WithConfig


MODELS = {merge: model_of(merge) for merge in (1, 2, 3)}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 7), st.tuples(st.integers(1, 4), st.integers(1, 4))), min_size=1, max_size=12),
    st.sampled_from(list(MODELS)),
)
def test_positions_are_those_of_hf(parts: list[int | tuple[int, int]], merge: int) -> None:
    """Any interleaving of text runs and images (rows x columns of merged patches, a separator token after each)."""
    tokens, images = [], []
    for part in parts:
        if isinstance(part, int):
            tokens += [1] * part
        else:
            tokens += [PAD] * (part[0] * part[1]) + [2]
            images.append(image(*part, merge=merge))
    ids = torch.tensor([tokens])
    grids = torch.tensor([shown.grid for shown in images]) if images else None
    expected, _ = Qwen2_5_VLModel.get_rope_index(MODELS[merge], ids, mm_token_type_ids=(ids == PAD).int(), image_grid_thw=grids)
    assert mrope_positions(tokens, images, PAD).tolist() == expected[:, 0].tolist()
    assert sum(shown.num_tokens for shown in images) == tokens.count(PAD)


def test_every_parameter_is_of_one_part_and_every_tower_linear_of_one_target() -> None:
    """The tower's matrices but for the patches' own, which is a convolution."""
    assert tuple(QWEN2_5_VL.parts) == PARTS and tuple(QWEN2_5_VL.vision_lora) == ("vision", "projector")
    spec = known_spec("Qwen/Qwen2.5-VL-3B-Instruct")
    for row in spec.rows():
        parts = [part for part, names in QWEN2_5_VL.parts.items() if row.mcore.startswith(tuple(name.removesuffix("*") for name in names))]
        assert len(parts) == 1, row.mcore
    linears = {name.removeprefix("visual.").removesuffix(".weight") for name, shape in spec.shapes().items() if len(shape) == 2}
    tower = {name for name in linears if name.startswith(("blocks.", "merger."))}
    assert len(tower) == 32 * 5 + 2
    for name in tower:
        targets = [target for target, pattern in QWEN2_5_VL.vision_lora.items() if re.fullmatch(pattern, name)]
        assert targets == ["projector" if name.startswith("merger.") else "vision"], name
