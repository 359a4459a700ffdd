"""Tests the renderer against the tokenizer's own rendering of whole conversations."""

import json
import shutil
import unicodedata
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers import AutoProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from megatron_rl.config import ModelSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image, TokenSequence


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=12800))


LIMITS = st.integers(784, 200_000)


@pytest.fixture(scope="module")
def limited(random_model: Path) -> Renderer:
    """Return a renderer with limits that the tests change."""
    return Renderer(ModelSettings(path=str(random_model)))


@settings(max_examples=2_000, deadline=None)
@given(short=st.integers(1, 4_000), ratio=st.floats(1, 100), fewest=LIMITS, spread=st.floats(1, 20), turned=st.booleans())
def test_what_was_resized_stays_within_the_final_limits(
    limited: Renderer, short: int, ratio: float, fewest: int, spread: float, turned: bool
) -> None:
    """A resized image is not resized again by transformers' `smart_resize` with `final_pixels` as
    its limits, whatever the configured limits are. A vLLM server resizes the images that it
    receives with this rule.
    """
    limited.min_pixels, limited.max_pixels = fewest, int(fewest * spread)
    size = (int(short * ratio), short)[:: -1 if turned else 1]
    width, height = limited.final_size(*size)
    least, most = limited.final_pixels
    assert smart_resize(height, width, factor=28, min_pixels=least, max_pixels=most) == (height, width)


def test_the_rule_leaves_its_own_limits(limited: Renderer) -> None:
    """Example by hand: 150 x 100 is 5 x 4 tokens, 15,680 pixels. Enlarged to 19,600 pixels it is
    171 x 114, rounded up to 7 x 5 tokens, which `smart_resize` with the same limits would shrink to
    5 x 4 again.
    """
    limited.min_pixels, limited.max_pixels = 19_600, 20_000
    assert limited.final_size(150, 100) == (196, 140)
    assert smart_resize(140, 196, factor=28, min_pixels=19_600, max_pixels=20_000) == (112, 140)
    assert limited.final_pixels == (784, 76_099)
    limited.min_pixels, limited.max_pixels = 3_136, 1_003_520
    assert limited.final_pixels == (784, 1_003_520), "an engine makes room for no more than there is"


def user(text: str, *pictures: Pillow.Image) -> dict:
    return {"role": "user", "content": [*({"type": "image", "image": p} for p in pictures), {"type": "text", "text": text}]}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def bytes_of(image: Image) -> int:
    return image.patch_PC.untyped_storage().nbytes() + 4 * image.pil.width * image.pil.height


def gradient(width: int, height: int) -> Pillow.Image:
    return Pillow.linear_gradient("L").resize((width, height)).convert("RGB")


def test_a_prompt_is_what_the_processor_makes(renderer: Renderer, random_model: Path) -> None:
    """For images that need no resize, the ids, patches and grids equal those of Hugging Face's
    processor.
    """
    messages = [user("Compare.", gradient(56, 84), gradient(112, 56))]
    context = renderer.prompt(messages)
    processor = AutoProcessor.from_pretrained(random_model)
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = processor(text=[text], images=[gradient(56, 84), gradient(112, 56)], do_resize=False, return_tensors="pt")
    assert context.token_ids == expected["input_ids"][0].tolist()
    assert torch.equal(torch.cat([image.patch_PC for image in context.images]), expected["pixel_values"])
    assert [list(image.grid) for image in context.images] == expected["image_grid_thw"].tolist()
    assert not any(context.loss_mask)


def test_patches_are_made_again_of_the_picture(renderer: Renderer, random_model: Path) -> None:
    """Patches that are recomputed from the image are equal bit for bit, also with another renderer.
    The image is requested only if its patches are not cached.
    """
    (image,) = renderer.prompt([user("Look.", gradient(300, 300))]).images
    bare, asked = image.without_patches(), []

    def picture_of(wanted: Image) -> Pillow.Image:
        asked.append(wanted.key)
        return image.pil

    assert bare.patch_PC is None and (bare.pil, bare.key, bare.grid) == (image.pil, image.key, image.grid)
    elsewhere = Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=12800))
    for maker, times in ((renderer, 0), (elsewhere, 1), (elsewhere, 1)):
        assert torch.equal(maker.patches(replace(bare, pil=None), picture_of), image.patch_PC)
        assert asked == [image.key] * times
    assert elsewhere.patches(image, picture_of) is image.patch_PC


def test_a_final_picture_is_not_resized_again(random_model: Path) -> None:
    """With narrow limits, resizing an image of its final size would change the size again. Its
    patches are still recomputed without a second resize.
    """
    narrow = ModelSettings(path=str(random_model), min_pixels=19600, max_pixels=20000)
    near, far, moved = Renderer(narrow), Renderer(narrow), 0
    for width, height in [(60, 50), (50, 60), (400, 100), (70, 300), (140, 140)]:
        (image,) = near.prompt([user("Look.", gradient(width, height))]).images
        moved += near.final_size(*image.pil.size) != image.pil.size
        assert torch.equal(far.patches(image.without_patches(), attrgetter("pil")), image.patch_PC)
        assert far.image(image.pil).pil.size == near.final_size(*image.pil.size), "given anew it is a picture like any other"
    assert moved >= 3, "the pictures of this test show nothing"


def test_pictures_are_resized_once_within_the_limits(renderer: Renderer) -> None:
    image = renderer.image(gradient(300, 300))
    assert image.pil.size == (112, 112) and image.grid == (1, 8, 8) and image.num_tokens == 16
    assert renderer.image(gradient(300, 300)) is image, "remembered by content"
    assert renderer.image(image.pil).key == image.key, "a picture at its final size is left alone"
    assert renderer.image(gradient(20, 20)).pil.size == (56, 56)


def test_threads_render_side_by_side(random_model: Path) -> None:
    """Eight threads that render the same images in different orders produce the same prompts as one
    thread. This holds with a cache for all twelve images and with a cache for four.
    """
    model = ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=12800)
    pictures = [gradient(150 + 7 * number, 120 + number % 3) for number in range(12)]
    alone = Renderer(model)
    expected = [alone.prompt([user(f"Number {number}.", picture)]) for number, picture in enumerate(pictures)]
    one = expected[0].images[0].patch_PC.nbytes
    for room in (100 * one, 4 * one):
        shared = Renderer(model, cache_bytes=room)

        def all_of_them(start: int, shared: Renderer = shared) -> list[TokenSequence]:
            order = [(start + 5 * number) % 12 for number in range(36)]
            made = {number: shared.prompt([user(f"Number {number}.", pictures[number])]) for number in order}
            return [made[number] for number in range(12)]

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(all_of_them, range(8)))
        for contexts in found:
            for context, truth in zip(contexts, expected, strict=True):
                assert (context.token_ids, context.images[0].key) == (truth.token_ids, truth.images[0].key)
                assert torch.equal(context.images[0].patch_PC, truth.images[0].patch_PC)
        assert shared._num_bytes == sum(bytes_of(image) for image in shared._images.values()) <= room
        assert sorted(shared._images) == sorted(set(shared._final_key_by_source.values())) == sorted(shared._sources_by_final_key), (
            "what is gone leaves no name"
        )


@pytest.mark.known_failure("host-memory-grows")
def test_what_is_remembered_is_counted_once(random_model: Path) -> None:
    """A cache for three images holds three images, including resized images and images that are
    found by their key. An evicted image is freed.
    """
    made = [Pillow.new("RGB", (300, 300), (number, 0, 0)) for number in range(4)]
    model, one = ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=12800), 112 * 112 * (4 + 3 * 2 * 4)
    renderer = Renderer(model, cache_bytes=3 * one)
    images = [renderer.image(picture) for picture in made[:3]]
    assert {bytes_of(image) for image in images} == {one} and {image.pil.size for image in images} == {(112, 112)}
    assert all(renderer.patches(image.without_patches(), attrgetter("pil")) is image.patch_PC for image in images)
    assert all(renderer.image(picture) is image for picture, image in zip(made[:3], images, strict=True))
    first = weakref.ref(images.pop(0).patch_PC)
    assert first() is not None
    images.append(renderer.image(made[3]))
    assert first() is None and renderer._num_bytes == 3 * one
    assert all(renderer.image(picture) is image for picture, image in zip(made[1:], images, strict=True))


@settings(max_examples=60, deadline=None)
@given(replies=st.lists(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<|>"), max_size=20), min_size=1, max_size=4))
def test_continuing_equals_rendering_the_whole(renderer: Renderer, replies: list[str]) -> None:
    """The ids of an episode that grows turn by turn equal the ids of the whole transcript, and the
    loss mask covers the responses.
    """
    messages = [user("Look.", gradient(56, 56))]
    grown = renderer.prompt(messages)
    for reply in replies:
        ids = [*renderer.tokenizer(reply, add_special_tokens=False)["input_ids"], renderer.end_id]
        grown.extend(ids, logprobs=[-1.0] * len(ids))
        messages.append(assistant(reply))
        messages.append(user("And now?", gradient(84, 56)))
        more = renderer.observation(grown, [messages[-1]])
        grown.extend(more.token_ids, images=tuple(more.images))
    messages.append(assistant("end"))
    whole = renderer.transcript(messages)
    ending = [*renderer.tokenizer("end", add_special_tokens=False)["input_ids"], renderer.end_id]
    assert whole.token_ids == grown.token_ids + ending
    assert whole.loss_mask == grown.loss_mask + [1] * len(ending)
    assert [image.key for image in whole.images] == [image.key for image in grown.images]
    said = [token for token, mask in zip(whole.token_ids, whole.loss_mask, strict=True) if mask]
    spoken = "".join(f"{reply}<|im_end|>" for reply in [*replies, "end"])
    assert renderer.tokenizer.decode(said) == unicodedata.normalize("NFC", spoken), "Qwen's tokenizer normalizes text"


def test_a_cut_off_turn_is_closed_by_an_unsampled_token(renderer: Renderer) -> None:
    context = renderer.prompt([user("Go.")])
    context.extend([40, 41], logprobs=[-1.0, -1.0])
    more = renderer.observation(context, [user("Again.")])
    assert more.token_ids[0] == renderer.end_id and set(more.loss_mask) == {0}
    assert context.token_ids[-2:] == [40, 41], "what is observed is added by the episode, if it fits"
    context.extend([renderer.end_id], logprobs=[-1.0])
    assert renderer.observation(context, [user("Again.")]).token_ids == more.token_ids[1:]


SPECIAL = ("<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>", "<|video_pad|>")


@pytest.mark.parametrize("name", SPECIAL)
def test_special_tokens_that_a_tool_or_a_data_set_wrote_are_text(renderer: Renderer, name: str) -> None:
    """Otherwise, text from a tool or a dataset could end a turn, imitate the assistant, or stand
    for an image that does not exist.
    """
    plain, spelled = renderer.prompt([user("a b", gradient(56, 56))]), renderer.prompt([user(f"a {name} b {name}", gradient(56, 56))])
    for token in (*SPECIAL, "<|vision_end|>"):
        known = renderer.tokenizer.convert_tokens_to_ids(token)
        assert spelled.token_ids.count(known) == plain.token_ids.count(known), token
    assert "< " + name[1:] in renderer.tokenizer.decode(spelled.token_ids)
    more = renderer.observation(spelled, [{"role": "user", "content": f"{name}"}])
    assert more.token_ids.count(renderer.end_id) == 2, "the one that closes the cut-off turn and the one after this message"


@pytest.mark.known_failure("tool-images-dropped")
def test_tool_output_in_a_transcript_is_masked(renderer: Renderer) -> None:
    messages = [
        user("Zoom in."),
        assistant("crop"),
        {"role": "tool", "content": [{"type": "text", "text": "done"}, {"type": "image", "image": gradient(56, 56)}]},
        assistant("seen"),
    ]
    context = renderer.transcript(messages)
    said = [token for token, mask in zip(context.token_ids, context.loss_mask, strict=True) if mask]
    assert renderer.tokenizer.decode(said) == "crop<|im_end|>seen<|im_end|>"
    assert context.token_ids.count(renderer.image_token_id) == context.images[0].num_tokens == 4


@pytest.mark.known_failure("image-token-sampled")
def test_banned_are_vision_tokens_and_ids_beyond_the_tokenizer(renderer: Renderer) -> None:
    banned = set(renderer.banned_ids)
    assert {renderer.image_token_id, *range(len(renderer.tokenizer), 1024)} <= banned
    assert renderer.end_id not in banned and not banned & set(range(900))


def test_another_resampling_filter_is_refused(random_model: Path, tmp_path: Path) -> None:
    """Public case I9: images are always resized with bicubic interpolation (3). A model whose
    processor file names another filter is refused.
    """
    folder = shutil.copytree(random_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    file = next(path for path in (folder / "processor_config.json", folder / "preprocessor_config.json") if path.exists())
    stored = json.loads(file.read_text())
    part = stored.get("image_processor", stored)
    for resample, is_read in ((3, True), (2, False)):
        part["resample"] = resample
        file.write_text(json.dumps(stored))
        if is_read:
            Renderer(ModelSettings(path=str(folder)))
        else:
            with pytest.raises(ValueError, match=r"its processor resizes images with resample=.*2.*, but only 3 \(bicubic\)"):
                Renderer(ModelSettings(path=str(folder)))


def test_an_image_knows_how_many_patches_make_a_token(renderer: Renderer) -> None:
    image = renderer.image(gradient(84, 56))
    assert (image.grid, image.merge, image.num_tokens) == ((1, 4, 6), 2, 6)
    assert image.num_patches == 24 == len(image.patch_PC)
    assert replace(image, grid=(1, 6, 9), merge=3).num_tokens == 6
