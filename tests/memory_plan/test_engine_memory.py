"""The engine's memory plan against vLLM itself: its configuration for every recipe, the images that
it profiles, and its peak memory."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from megatron_rl.config import EngineSettings, ModelSettings, RunSettings, Settings
from megatron_rl.memory_plan.engine_memory import (
    LOGIT_BYTES,
    max_batched_tokens,
    max_image_tokens,
    num_profiled_image_tokens,
    peak_values_per_patch,
    peak_values_per_token,
    plan_engine,
)
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.vllm.sampler import EngineNoise
from megatron_rl.types import SpecialTokens
from tests.conftest import SUPPORT
from tests.contracts.test_configs import settings_of
from tests.contracts.test_recipes import RECIPES
from tests.memory_plan.test_activations import Live
from tests.support import fork_server
from tests.support.qwen3 import qwen3_4b_spec

FIRST = "codev_7b_l40s8"
"""Recipe whose vLLM configuration is also built without this project's image limits."""


@pytest.fixture(scope="module")
def described(random_model: Path) -> list[dict]:
    """Return vLLM's configuration of each recipe, and two configurations of FIRST."""
    others = [recipe for recipe in RECIPES if recipe != FIRST]
    ended = fork_server.run_script(SUPPORT / "cuda_config.py", random_model, FIRST, *others, timeout_s=400)
    assert ended.returncode == 0, ended.stdout[-6000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def test_vllm_batches_profiles_and_sleeps_as_the_plan_says(described: list[dict]) -> None:
    """For every recipe, the plan equals vLLM's configuration.

    Compared are the tokens and sequences of a step, the profiled images, and which memory is
    released in sleep mode and which stays.
    """
    ours = {made["recipe"]: made for made in described if made["is_ours"]}
    assert ours.keys() == set(RECIPES)
    for recipe, made in ours.items():
        settings = settings_of(f"experiment={recipe}")
        model, engine = load_known_spec(settings.model.path), settings.engine
        assert made["batched"] == max_batched_tokens(settings), recipe
        assert (made["sequences"], made["length"], made["share"]) == (
            engine.max_num_seqs, engine.max_model_len, engine.gpu_memory_utilization,
        ), recipe  # fmt: skip
        assert made["picture"] == {"image": max_image_tokens(model, settings)}, recipe
        assert made["patches"][0] == model.vision.patches_per_token * max_image_tokens(model, settings), recipe
        assert made["pictures"]["image"] * made["picture"]["image"] == num_profiled_image_tokens(model, settings), recipe
        assert made["cumem"] and not made["graphs_leave"], "GRAPHS stay in sleep, the rest of the share goes"
        assert made["graphs"] != "NONE" and made["async"] and made["prefix_caching"] and not made["v2"]
        assert (made["tp"], made["launcher"]) == (engine.tp, "external_launcher")
        assert (made["load"], made["logprobs"], made["dtype"]) == ("dummy", "processed_logprobs", f"torch.{engine.dtype}")


def test_vllm_profiles_our_pictures_and_not_its_own(described: list[dict]) -> None:
    """vLLM profiles images of the project's maximum size, 0.7 megapixels.

    Without these limits it would encode one image of 12.8 megapixels and reserve memory for its
    16,384 tokens.
    """
    ours, its_own = [made for made in described if made["recipe"] == FIRST]
    assert (its_own["picture"], its_own["pictures"], its_own["patches"][0]) == ({"image": 16384}, {"image": 1}, 65536)
    assert (ours["picture"], ours["pictures"], ours["patches"][0]) == ({"image": 892}, {"image": 9}, 3568)
    assert (its_own["cache"], ours["cache"]) == (16384, 8192)


@pytest.mark.parametrize(
    ("pixels", "images", "length", "sequences", "expected"),
    [
        (2_000_000, 8, 28672, 256, 6 * 2550), (2_000_000, 1, 28672, 5, 5 * 2550), (784 * 16384, 8, 28672, 256, 16384),
        (784 * 20000, 8, 28672, 256, 20000), (784 * 1280, 8, 1000, 8, 6 * 1280), (784, 1, 100, 7, 7),
    ],
)  # fmt: skip
def test_pictures_of_a_profile_by_hand(pixels: int, images: int, length: int, sequences: int, expected: int) -> None:
    """The profiled image tokens equal values computed by hand for an H200, whose step has 16,384
    tokens. 2 megapixels are 2,551 squares of 28 pixels, which is a prime; 2,550 = 50 * 51 form a
    rectangle. Eight sequences of 1,000 tokens are a batch of 8,000."""
    settings = Settings(
        model=ModelSettings(max_pixels=pixels, min_pixels=784), run=RunSettings(dir="there"),
        engine=EngineSettings(max_images=images, max_model_len=length, max_num_seqs=sequences),
    )  # fmt: skip
    assert num_profiled_image_tokens(load_known_spec("Qwen/Qwen2.5-VL-7B-Instruct"), settings) == expected


def test_the_engine_of_7b_by_hand() -> None:
    """The plan of the 7B engine equals values computed by hand.

    Weights take 16.58 GB; keys and values of a token take 2 * 28 layers * 4 heads * 128 * 2 bytes =
    57,344.

    Its largest step has 13 * 1,280 values for each of 4 * 15,300 patches plus their 1,176 pixels,
    which exceeds the language model's 16,384 tokens. Added are the image embeddings, 256 rows of
    logits, and 1.5 GB of CUDA graphs.
    """
    model, of_a_run = load_known_spec("Qwen/Qwen2.5-VL-7B-Instruct"), RunSettings(dir="there")
    given = {"dtype": "bfloat16", "gpu_memory_utilization": 0.5, "max_model_len": 32768}
    pictures = ModelSettings(max_pixels=2_000_000)
    engine = plan_engine(model, Settings(model=pictures, engine=EngineSettings(**given), run=of_a_run))
    language, tower = 16384 * (4 * 3584 + 3 * 18944) * 2, 4 * 15300 * (13 * 1280 * 2 + 1176 * 6)
    assert tower > language
    assert engine.step_bytes == tower + 15300 * 3584 * 2 + 256 * 152064 * 22 + 1_500_000_000
    assert (engine.budget_bytes, engine.weight_bytes, engine.kv_bytes_per_token) == (70_500_000_000, 16_584_333_312, 57_344)
    assert engine.cache_tokens == (70_500_000_000 - 16_584_333_312 - engine.step_bytes) // 57_344
    halved = plan_engine(model, Settings(model=pictures, engine=EngineSettings(**given, tp=2), run=of_a_run))
    assert (halved.weight_bytes, halved.kv_bytes_per_token) == (engine.weight_bytes // 2, 57_344 // 2)


def test_the_engine_of_another_family_by_hand() -> None:
    """The plan of Qwen3-VL-8B equals values computed by hand.

    Its merged patches are 32 pixels wide: 2 megapixels are 1,953 of them, and 8 images are 15,624.

    The vision tower also holds one row of learned positions. For each token it holds three more
    rows of 4,096, which are added after layers and have their own buffers.
    """
    model = load_known_spec("Qwen/Qwen3-VL-8B-Instruct")
    given = EngineSettings(dtype="bfloat16", gpu_memory_utilization=0.5, max_model_len=32768)
    engine = plan_engine(model, Settings(model=ModelSettings(max_pixels=2_000_000), engine=given, run=RunSettings(dir="there")))
    language, tower = 16384 * (4 * 4096 + 3 * 12288) * 2, 15624 * (4 * (14 * 1152 * 2 + 1536 * 6) + 3 * 4096 * 2)
    assert tower > language
    assert engine.step_bytes == tower + 4 * 15624 * 4096 * 2 + 256 * 151936 * 22 + 1_500_000_000
    assert (engine.weight_bytes, engine.kv_bytes_per_token) == (2 * 8_767_123_696 + 3 * 16384 * 4096 * 2, 2 * 36 * 8 * 128 * 2)


def test_an_engine_of_qwen3_holds_what_its_layers_add() -> None:
    """The plan includes the DeepStack buffers: three layers add rows to 16,384 tokens, so an image
    token has four rows of 2,560 values.

    2 megapixels are 1,953 squares of 32 pixels, a rectangle of 31 by 63, and a step has eight such
    images. vLLM's own rows are tested in tests/parity/test_engine_families.py.
    """
    model, pictures, of_a_run = qwen3_4b_spec(), ModelSettings(max_pixels=2_000_000), RunSettings(dir="there")
    given = {"dtype": "bfloat16", "gpu_memory_utilization": 0.5, "max_model_len": 32768}
    whole, halved = (plan_engine(model, Settings(model=pictures, engine=EngineSettings(**given, tp=tp), run=of_a_run)) for tp in (1, 2))
    tokens, added = 8 * 1953, 3 * 16384 * 2560 * 2
    language, tower = 16384 * (4 * 2560 + 3 * 9728) * 2, tokens * (4 * (14 * 1024 * 2 + 1536 * 6) + 3 * 2560 * 2)
    assert tower > language
    assert whole.step_bytes == tower + tokens * (1 + 3) * 2560 * 2 + 256 * 151936 * 22 + 1_500_000_000
    assert whole.weight_bytes - added == 2 * (halved.weight_bytes - added) == 2 * sum(math.prod(shape) for shape in model.shapes().values())


@pytest.fixture(scope="module")
def engine(random_model: Path) -> Iterator[ColocatedEngine]:
    tokens = SpecialTokens(image_token_id=1, banned_ids=[3], stop_ids=[2])
    made = ColocatedEngine(str(random_model), EngineSettings(kv_cache_mib=32), special_tokens=tokens, group=None)
    yield made
    made.close()


@pytest.fixture
def model(random_model: Path) -> ModelSpec:
    return read_spec(random_model)


@pytest.fixture
def runner(engine: ColocatedEngine) -> GPUModelRunner:
    return engine._core._engine.model_executor.driver_worker.worker.model_runner


def peak(runner: GPUModelRunner, act, *given: torch.Tensor) -> int:  # noqa: ANN001
    """Return the peak bytes of all tensors except the weights and the `given` tensors."""
    served = runner.get_model()
    live = Live([*served.parameters(), *served.buffers(), *given])
    with torch.inference_mode(), live:
        act()
    return live.peak


@pytest.mark.parametrize("side", [20, 40])
def test_the_tower_holds_at_once_what_the_plan_says(runner: GPUModelRunner, model: ModelSpec, side: int) -> None:
    """The peak memory of vLLM's vision tower equals the plan within 1%, in fp32 with torch's
    attention on a CPU."""
    patch_PC, grid = torch.randn(side * side, 1176), torch.tensor([[1, side, side]])
    held = peak(runner, lambda: runner.get_model().embed_multimodal(pixel_values=patch_PC, image_grid_thw=grid), patch_PC)
    assert held == pytest.approx(side * side * peak_values_per_patch(model, tp=1) * 4, rel=0.01)


def test_a_layer_holds_at_once_what_the_plan_says(runner: GPUModelRunner, model: ModelSpec) -> None:
    """The peak memory per additional token equals the plan within 1%.

    A CPU also keeps the MLP activation before the product (F values), which CUDA's kernel does not
    keep.
    """
    few, many = (peak(runner, lambda tokens=tokens: runner._dummy_run(tokens, is_profile=True)) for tokens in (1024, 2048))
    assert (many - few) / 1024 / 4 >= peak_values_per_token(model, tp=1)
    assert (many - few) / 1024 / 4 == pytest.approx(peak_values_per_token(model, tp=1) + model.ffn_size, rel=0.01)


def test_drawing_a_token_holds_at_once_what_the_plan_says(runner: GPUModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak memory of sampling from bfloat16 logits equals the plan within 2%.

    EngineNoise, which samples on CUDA, runs inside vLLM's own sampler.
    """
    monkeypatch.setattr(runner.sampler.topk_topp_sampler, "forward", None)
    EngineNoise(runner)
    rows, nothing = 64, torch.empty(0)
    asked = SamplingMetadata(
        temperature=torch.full((rows,), 0.5), all_greedy=False, all_random=True, top_p=None, top_k=None, generators={}, max_num_logprobs=0,
        logprob_token_ids=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=nothing, presence_penalties=nothing,
        repetition_penalties=nothing, output_token_ids=[[] for _ in range(rows)], spec_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    held = peak(runner, lambda: runner.sampler(logits=torch.randn(rows, 50_000).bfloat16(), sampling_metadata=asked))
    assert held / rows / 50_000 == pytest.approx(LOGIT_BYTES, rel=0.02)
