"""Tests the speaker's application with known responses, and in its own process against the greedy
decoding of Hugging Face."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from megatron_rl.config import EngineSettings, WeightPublishSettings
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.weight_publisher import WeightPublisher
from megatron_rl.tasks.lewis.description import PROMPT
from megatron_rl.tasks.lewis.server.image_cache import ImageCache
from megatron_rl.tasks.lewis.server.request_limiter import RequestLimits
from megatron_rl.tasks.lewis.server.speaker_app import MAX_REPLY_TOKENS, SpeakerService, create_app
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.model_server_process import ServerProcess, encode_base64, encode_png, make_noise_image, running_model_server

REPLIES = {
    "mug": "<thinking>t</thinking><coarse>a photo of a red mug</coarse><detailed>The mug is red.</detailed>",
    "cap": "A photo of a blue cap. The cap is blue and old. <state>worn</state><location>a shelf",
}

TOKEN = "a-word-of-many-letters"
SAID = "<state>chipped</state><location>on a shelf</location>"


class Room:
    """Engine holder with a fixed description for each category that its prompt names."""

    version, busy_s, is_healthy, settings = "one", 0.0, True, EngineSettings(max_num_seqs=4)
    held, most = 0, 0
    """Number of images that are rendered and not answered yet: now, and at most."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.renderer = SimpleNamespace(prompt=self._prompt, decode_response=lambda ids: "".join(map(chr, ids)))

    def _prompt(self, messages: Any) -> str:
        with self.lock:
            self.held += 1
            self.most = max(self.most, self.held)
        return messages[0]["content"][1]["text"]

    async def run_in_renderer(self, act: Any) -> Any:
        return await asyncio.to_thread(act)

    @asynccontextmanager
    async def hold_weights(self) -> AsyncIterator[str]:
        yield self.version

    async def generate(self, context: str, sampling: SamplingSettings) -> Completion:
        assert sampling.temperature == 0.0 and sampling.max_tokens == MAX_REPLY_TOKENS
        (category,) = [name for name in REPLIES if context.startswith(PROMPT.format(category=name))]
        await asyncio.sleep(0.001)
        with self.lock:
            self.held -= 1
        has_situation = "<state>" in context and "<location>" in context
        assert sampling.stop == (("</location>",) if has_situation else ("</detailed>",))
        return Completion(list(map(ord, REPLIES[category] + SAID * has_situation)), [], is_stopped=True, weight_versions=[])


def asked(path: str, body: object, *, room: Room | None = None) -> httpx.Response:
    async def ask() -> httpx.Response:
        app = create_app(SpeakerService(room or Room(), ImageCache([]), limits=RequestLimits(), name="scripted"))
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9001", transport=httpx.ASGITransport(app)) as http:
            return await http.post(path, json=body)

    return asyncio.run(ask())


def test_few_pictures_are_rendered_at_a_time() -> None:
    """Finding 7: all images of a request, 14 MB each, formerly waited for the engine. Now at most
    as many are rendered as the engine processes at a time, over all requests, and a request that
    fails frees its slots."""
    images = [{"base64": encode_base64(encode_png(make_noise_image(seed, side=28)))} for seed in range(40)]
    batch = [{"image": image, "category": "mug" if number % 3 else "cap"} for number, image in enumerate(images)]
    room = Room()

    async def ask() -> list[httpx.Response]:
        app = create_app(SpeakerService(room, ImageCache([]), limits=RequestLimits(), name="scripted"))
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9001", transport=httpx.ASGITransport(app)) as http:
            bodies = [{"batch": batch}, {"batch": batch[::-1]}]
            answers = await asyncio.gather(*(http.post("/batch_describe", json=body) for body in bodies))
            assert room.most == room.settings.max_num_seqs and room.held == 0
            lacking = [{"image": {"sha256": "0" * 64}, "category": "mug"}] * 6
            failed = [await http.post("/batch_describe", json={"batch": batch[:5] + lacking}) for _ in range(3)]
            return [*answers, *failed, await http.post("/batch_describe", json={"batch": batch[:5]})]

    answers = asyncio.run(ask())
    assert [answer.status_code for answer in answers] == [200, 200, 404, 404, 404, 200]
    coarse = [each["coarse"] for each in answers[0].json()["results"]]
    assert coarse == ["a photo of a red mug" if number % 3 else "A photo of a blue cap" for number in range(40)]
    assert [each["coarse"] for each in answers[1].json()["results"]] == coarse[::-1]


def test_each_picture_has_one_description() -> None:
    """Each image has one description, and /describe works. The game's own service returned the list
    of all descriptions for each image and never responded to /describe."""
    images = [{"base64": encode_base64(encode_png(make_noise_image(seed, side=28)))} for seed in range(3)]
    batch = [{"image": image, "category": category} for image, category in zip(images, ("mug", "cap", "mug"), strict=True)]
    told = asked("/batch_describe", {"batch": batch}).json()
    mug, cap, again = told["results"]
    assert mug == again and told["version"] == "one" and len(told["results"]) == 3
    assert (mug["thinking"], mug["coarse"], mug["detailed"], mug["state"]) == ("t", "a photo of a red mug", "The mug is red.", "")
    assert (cap["thinking"], cap["coarse"], cap["detailed"]) == ("", "A photo of a blue cap", "The cap is blue and old.")
    assert (cap["state"], cap["location"], cap["text"]) == ("worn", "a shelf", REPLIES["cap"])
    assert asked("/describe", batch[1]).json()["coarse"] == "A photo of a blue cap"


def test_state_and_location_are_asked_for_where_they_are_wanted() -> None:
    """The speaker describes state and location if they are requested, by a longer prompt whose
    response ends after them. One request may contain images with and without them."""
    image = {"base64": encode_base64(encode_png(make_noise_image(0, side=28)))}
    batch = [{"image": image, "category": "mug", "situation": wanted} for wanted in (True, False)]
    with_it, without = asked("/batch_describe", {"batch": batch}).json()["results"]
    assert (with_it["state"], with_it["location"]) == ("chipped", "on a shelf") and (without["state"], without["location"]) == ("", "")
    assert with_it["detailed"] == without["detailed"] == "The mug is red."


@pytest.mark.parametrize(
    "body",
    [{}, {"category": "mug"}, {"image": {}}, {"image_path": "x", "image": {"base64": "eA=="}}, {"image": {"base64": "eA=="}},
     {"image_path": "x.png"}, {"image": {"base64": "?"}}, {"image_path": "x", "categroy": "mug"}],
)  # fmt: skip
def test_what_is_no_picture_is_refused(body: dict[str, object]) -> None:
    answer = asked("/describe", body)
    assert answer.status_code == 422 and answer.json()["detail"]
    assert asked("/batch_describe", {"batch": [body]}).status_code == 422


@pytest.fixture(scope="module")
def speaker(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("speaker")
    for number in range(2):
        (root / f"{number}.png").write_bytes(encode_png(make_noise_image(number)))
    token = root / "token"
    token.write_text(TOKEN)
    with running_model_server(
        "speaker", random_model, "--root", root, "--max-model-len", "256", "--trained", "--token-file", token
    ) as server:
        server.headers = {"Authorization": f"Bearer {TOKEN}"}
        yield server


def says_what_hugging_face_says(speaker: ServerProcess, folder: Path) -> str:
    """Assert that the speaker's texts begin with the first 40 characters of Hugging Face's greedy
    decoding, which runs to the end of the context. Return the speaker's version."""
    answer = speaker.post(
        "/batch_describe", {"batch": [{"image_path": f"{number}.png", "category": "mug"} for number in range(2)]}, timeout_s=300
    )
    assert answer.status_code == 200, answer.text
    processor = AutoProcessor.from_pretrained(folder)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    content = [{"type": "image"}, {"type": "text", "text": PROMPT.format(category="mug")}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    for number, result in enumerate(answer.json()["results"]):
        inputs = processor(text=[prompt], images=[make_noise_image(number)], do_resize=False, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        ids = model.generate(**inputs, max_new_tokens=256 - length, do_sample=False)[0, length:]
        expected = processor.tokenizer.decode(ids, skip_special_tokens=False).split("<|im_end|>")[0]
        assert result["text"].startswith(expected[:40]) and len(expected) > 40
    return str(answer.json()["version"])


def test_it_says_what_hugging_face_says_with_its_weights_and_with_those_that_a_run_sends(
    speaker: ServerProcess, random_model: Path, tmp_path: Path
) -> None:
    """The speaker decodes as Hugging Face does with its initial weights and with published ones.
    The published weights come in several parts, under the released names, to an engine that has
    cached these prompts."""
    first = says_what_hugging_face_says(speaker, random_model)
    make_checkpoint(tmp_path / "other", preset="nano", init="random", seed=7)
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    settings = WeightPublishSettings(urls=[speaker.url], chunk_mib=1.0, timeout_s=120.0, token_file=str(token))
    audience = WeightPublisher(settings, run="r", is_main=True)
    assert audience.publish(lambda: iter(tensors.items()), step=1) == {"weight_publish/num_behind": 0.0}
    assert says_what_hugging_face_says(speaker, tmp_path / "other") != first
