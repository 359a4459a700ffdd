"""M-RoPE positions of every model family against those of Hugging Face."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2VLModel, Qwen3VLModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from megatron_rl.models.mrope import interleave_sections, mrope_positions
from megatron_rl.types import Image

PAD = 9


def image(rows: int, columns: int, *, merge: int = 2) -> Image:
    return Image(pil=Pillow.new("RGB", (1, 1)), patch_PC=None, grid=(1, rows * merge, columns * merge), key="a", merge=merge)


@pytest.mark.known_failure("truncation-splits-images")
def test_placeholders_must_match_the_images() -> None:
    """Image placeholders that do not match the images are rejected."""
    with pytest.raises(ValueError, match="placeholders"):
        mrope_positions([1, PAD, 2], [image(1, 2)], PAD)
    with pytest.raises(ValueError, match="placeholders"):
        mrope_positions([1, 2], [image(1, 1)], PAD)
    with pytest.raises(ValueError, match="placeholders"):
        mrope_positions([1, PAD, 2], [], PAD)


def model_of(merge: int) -> type:
    """Build the minimal class that get_rope_index of every family needs as its model."""
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


@pytest.mark.known_failure("mrope-positions")
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 7), st.tuples(st.integers(1, 4), st.integers(1, 4))), min_size=1, max_size=12),
    st.sampled_from(list(MODELS)),
    st.sampled_from([Qwen2VLModel, Qwen2_5_VLModel, Qwen3VLModel]),
)
def test_positions_are_those_of_hf(parts: list[int | tuple[int, int]], merge: int, family: type) -> None:
    """Positions equal those of HF's get_rope_index for any interleaving of text runs and images.

    Images have rows x columns of merged patches, each followed by a separator token.
    """
    tokens, images = [], []
    for part in parts:
        if isinstance(part, int):
            tokens += [1] * part
        else:
            tokens += [PAD] * (part[0] * part[1]) + [2]
            images.append(image(*part, merge=merge))
    ids = torch.tensor([tokens])
    grids = torch.tensor([shown.grid for shown in images]) if images else None
    expected, _ = family.get_rope_index(MODELS[merge], ids, mm_token_type_ids=(ids == PAD).int(), image_grid_thw=grids)
    assert mrope_positions(tokens, images, PAD).tolist() == expected[:, 0].tolist()
    assert sum(shown.num_tokens for shown in images) == tokens.count(PAD)


@pytest.mark.parametrize("sections", [(24, 20, 20), (6, 5, 5), (3, 1, 2), (4, 2, 1)])
def test_axes_in_turn_are_those_of_hf(sections: tuple[int, int, int]) -> None:
    """The interleaved axis order equals that of transformers' rotary embedding on axes numbered 0,
    1 and 2. The number of sections is a multiple of 3, because Megatron restarts the axes in the
    second half of a head."""
    pairs = sum(sections)
    text = {"hidden_size": 2 * pairs, "num_attention_heads": 1, "head_dim": 2 * pairs}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    rotary = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**text, rope_parameters=rope))
    axis_3P = torch.arange(3.0)[:, None].expand(3, pairs)
    taken = rotary.recomposition_frequencies(axis_3P.clone())[:pairs].tolist()
    assert taken == [axis % 3 for axis, count in enumerate(interleave_sections(sections)) for _ in range(count)]
    assert len(interleave_sections(sections)) % 3 == 0, "Megatron begins anew for the second half of a head"
