"""Tests the renderer of every model family against the family's own processor in transformers: ids,
grids, patches, limits, banned ids and stop ids.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers import AutoConfig, AutoProcessor, ProcessorMixin

from megatron_rl.config import ModelSettings
from megatron_rl.models.family import FAMILIES
from megatron_rl.rollout.renderer import Renderer
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.packed_example import make_picture, user_message

LEAST, MOST = 4096, 40000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_checkpoint(folder / family, family=family, vision_depth=3)
    return folder


@pytest.fixture(scope="module")
def renderers(models: Path) -> dict[str, Renderer]:
    return {family: Renderer(ModelSettings(path=str(models / family), min_pixels=LEAST, max_pixels=MOST)) for family in FAMILIES}


@pytest.fixture(scope="module")
def theirs(models: Path) -> dict[str, ProcessorMixin]:
    return {family: AutoProcessor.from_pretrained(models / family) for family in FAMILIES}


def made_by(processor: ProcessorMixin, messages: list[dict], pictures: list[Pillow.Image], **how: object) -> dict[str, torch.Tensor]:
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return processor(text=[text], images=pictures, return_tensors="pt", **how)


SIDES = st.integers(10, 400)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=3))
def test_ids_and_grids_are_those_of_its_processor(
    family: str, sizes: list[tuple[int, int]], renderers: dict[str, Renderer], theirs: dict[str, ProcessorMixin]
) -> None:
    """For images of any size, with the same limits, the token ids and the grids equal those of the
    family's processor.
    """
    renderer, pictures = renderers[family], [Pillow.new("RGB", size, "red") for size in sizes]
    messages = [user_message("Compare.", *pictures)]
    context = renderer.prompt(messages)
    expected = made_by(theirs[family], messages, pictures, size={"shortest_edge": LEAST, "longest_edge": MOST})
    assert context.token_ids == expected["input_ids"][0].tolist()
    assert [list(image.grid) for image in context.images] == expected["image_grid_thw"].tolist()
    side = {"qwen2_5_vl": 28, "qwen2_vl": 28, "qwen3_vl": 32, "qwen3_vl_moe": 32, "qwen3_5": 32, "qwen3_5_moe": 32}[family]
    for image in context.images:
        width, height = image.pil.size
        assert width % side == height % side == 0 and LEAST <= width * height <= MOST
        assert image.num_tokens == width * height // side**2
    assert context.token_ids.count(renderer.image_token_id) == sum(image.num_tokens for image in context.images)


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_those_of_its_processor(family: str, renderers: dict[str, Renderer], theirs: dict[str, ProcessorMixin]) -> None:
    """For images that need no resize, the patches equal the processor's bit for bit, cut and
    normalized for the family's vision tower.
    """
    side = renderers[family].vision_token_side
    pictures = [make_picture(1, 112, 112).resize((3 * side, 4 * side)), make_picture(2, 112, 112).resize((5 * side, 2 * side))]
    messages = [user_message("Compare.", *pictures)]
    images = renderers[family].prompt(messages).images
    expected = made_by(theirs[family], messages, pictures, do_resize=False)
    assert torch.equal(torch.cat([image.patch_PC for image in images]), expected["pixel_values"])
    assert images[0].patch_PC.shape[1] == (1536 if family.startswith("qwen3") else 1176)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_never_sampled_and_what_ends_a_turn(family: str, models: Path, renderers: dict[str, Renderer]) -> None:
    """The banned ids are all vision ids of config.json, `<|vision_pad|>`, and the ids that the
    tokenizer has no token for. The only stop id is `<|im_end|>`.
    """
    renderer, config = renderers[family], AutoConfig.from_pretrained(models / family)
    vision = {config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id}
    pad = renderer.tokenizer.convert_tokens_to_ids("<|vision_pad|>")
    beyond = set(range(len(renderer.tokenizer), config.text_config.vocab_size))
    assert set(renderer.banned_ids) == vision | {pad} | beyond and len(vision | {pad}) == 5 and beyond
    assert renderer.stop_ids == [config.text_config.eos_token_id] == [renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_another_familys_processor_is_refused(models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(models / "qwen3_vl", tmp_path / "model")
    stored = json.loads((folder / "processor_config.json").read_text())
    stored["image_processor"] = json.loads((models / "qwen2_vl" / "processor_config.json").read_text())["image_processor"]
    (folder / "processor_config.json").write_text(json.dumps(stored))
    with pytest.raises(
        ValueError, match="patch_size in config.json is 16, but patch_size of the processor is 14; use the model's own processor$"
    ):
        Renderer(ModelSettings(path=str(folder)))
