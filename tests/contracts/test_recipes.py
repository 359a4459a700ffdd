"""Every GPU recipe is valid without a GPU: each rank's parameter count is its share of the Hugging
Face model, and the memory plan fits the GPU.
"""

import math
import re
from itertools import pairwise, product

import pytest

from megatron_rl.config import Settings
from megatron_rl.memory_plan.gpu_memory import plan_gpu_memory
from megatron_rl.memory_plan.gpu_specs import GPU_SPECS
from megatron_rl.memory_plan.rank_shares import compute_model_shares
from megatron_rl.memory_plan.step_time import StepTimeInputs, describe_step_time, estimate_step_seconds, make_step_time_inputs
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.preflight.settings import check_sizes
from megatron_rl.registry import has_critic, uses_sandbox
from tests.conftest import ROOT
from tests.contracts.test_configs import EXPERIMENTS, settings_of
from tests.support import fork_server

RECIPES = [name for name in EXPERIMENTS if not name.endswith("_cpu")]
WHOLE = ("norm.weight",)
"""Suffixes of language-model tensors that every tensor-parallel rank stores in full; all other
language-model tensors are sharded.
"""
TOTALS = {
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976, "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31_070_754_032, "Qwen/Qwen3.5-9B": 9_409_813_744,
}  # fmt: skip
"""Parameter counts of the released checkpoints, which are 7.51, 16.58 and 62.14 GB in bfloat16."""


def shares_of(settings: Settings) -> dict[int, int]:
    """Return the parameters per rank, keyed by pipeline stage, counted from the Hugging Face
    shapes.
    """
    parallel, model = settings.parallel, load_known_spec(settings.model.path)
    layers_a_stage = model.num_layers // parallel.pp
    counts = dict.fromkeys(range(parallel.pp), 0)
    for name, shape in model.shapes().items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        last = name.startswith(("model.norm", "lm_head"))
        stage = int(layer[1]) // layers_a_stage if layer else parallel.pp - 1 if last else 0
        whole = name.startswith("visual.") or name.endswith(WHOLE)
        counts[stage] += math.prod(shape) // (1 if whole else parallel.tp) // (parallel.ep if ".experts." in name else 1)
    if model.tie_word_embeddings and parallel.pp > 1:
        counts[parallel.pp - 1] += model.vocab_size * model.hidden_size // parallel.tp
    return counts


def adapters_of(settings: Settings) -> int:
    """Return the adapter parameters on one rank: rank * (inputs + outputs) of each projection, with
    the sharded side divided by tp.
    """
    model, tp = load_known_spec(settings.model.path), settings.parallel.tp
    hidden, inner, kv = model.hidden_size, model.ffn_size, model.num_kv_heads * model.hidden_size // model.num_heads
    column = 3 * hidden + (hidden + 2 * kv) // tp + 2 * (hidden + inner // tp)
    row = (hidden // tp + hidden) + (inner // tp + hidden)
    vision, pp = model.vision, settings.parallel.pp
    block = (
        4 * vision.hidden_size + 2 * vision.hidden_size + 3 * (vision.hidden_size + vision.ffn_size)
    )  # qkv in and out, proj, gate, up, down
    merged = vision.hidden_size * vision.spatial_merge_size**2
    sizes = {
        "attention+mlp": model.num_layers * (column + row) // pp, "vision": vision.num_blocks * block, "projector": 3 * merged + hidden,
    }  # fmt: skip
    assert not {"vision", "projector"} & {*settings.lora.targets} or pp == 1
    return settings.lora.rank * sum(size for targets, size in sizes.items() if targets.split("+")[0] in settings.lora.targets)


def head_of(settings: Settings) -> int:
    """Return the parameters of a value head on the policy's backbone: weights and biases of each of
    its layers.
    """
    if not has_critic(settings):
        return 0
    sizes = [load_known_spec(settings.model.path).hidden_size, *settings.critic.head_sizes, 1]
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(sizes))


def test_the_recipes_that_must_run_here_are_there() -> None:
    """The GPU recipes are exactly those of this list."""
    assert {
        "pyvision_image_7b_h200x8", "deepeyes_7b_h200x32", "codev_7b_h200x8", "codev_7b_l40s8", "vqa_3b_1gpu",
        "pyvision_image_7b_h200x16", "codev_7b_l40s32", "codev_7b_lora_l40s8",
        "visual_search_3b_lora_1gpu", "visual_search_3b_lora_1gpu_24g", "visual_search_3b_lora_1gpu_48g",
        "numberline_ppo_7b_h100x2", "ezpoints_ppo_7b_h100x2", "points24_ppo_7b_h100x2", "blackjack_ppo_7b_h100x2", "alfworld_ppo_7b_h100x2",
        "lewis_speaker_7b_h100x4", "lewis_listener_7b_h100x4", "qwen3_vl_30b_a3b_h200x8",
        "qwen3_5_9b_h200x8",
    } == set(RECIPES)  # fmt: skip


def check_seconds(case: StepTimeInputs) -> None:
    """Every part of the step time estimate is a finite number, and a step takes between 3 s and
    1200 s.
    """
    found = estimate_step_seconds(case)
    values = [*found.rollout.values(), *found.update.values(), *found.sync.values()]
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert 3 < found.step_total < 1200 and 0 < found.checkpoint < 600
    assert found.rollout["decode"] > 0 and found.update["arithmetic"] > 0 and found.sync["wake"] > 0
    assert case.episode.total_tokens <= case.settings.engine.max_model_len
    assert describe_step_time(case).startswith(
        f"{found.step_total:.0f} s per step expected on {case.world_size} {case.settings.plan.gpu}: rollout "
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_its_gpus(recipe: str) -> None:
    settings = settings_of(f"experiment={recipe}")
    model = load_known_spec(settings.model.path)
    check_sizes(settings, model, settings.plan.world_size)
    planned = plan_gpu_memory(
        model, settings, world_size=settings.plan.world_size, has_values=has_critic(settings), uses_sandbox=uses_sandbox(settings)
    )  # fmt: skip
    adapters = adapters_of(settings) + head_of(settings)
    expected = shares_of(settings)
    assert len(planned.ranks) == settings.parallel.tp * settings.parallel.pp
    for rank in planned.ranks:
        assert rank.rank_share.num_params == expected[rank.rank_share.pp_rank] + adapters
        assert rank.peak_bytes <= 0.9 * GPU_SPECS[settings.plan.gpu].memory_bytes
    vision = sum(math.prod(shape) for name, shape in model.shapes().items() if name.startswith("visual."))
    frozen = sum(expected.values()) if adapters else vision if "vision" in settings.model.frozen else 0
    assert (
        sum(rank.rank_share.num_trained_params for rank in planned.ranks if rank.rank_share.tp_rank == 0)
        == sum(expected.values()) + adapters - frozen
    )
    assert planned.fits
    room = {"l40s": 512, "h200": 1000}.get(settings.plan.gpu, 250 * settings.plan.world_size) * 10**9
    room *= 1 + (recipe == "qwen3_vl_30b_a3b_h200x8")  # the recipe states its larger node
    assert settings.plan.host_gb * 10**9 in (0, room)
    assert planned.host.node_bytes(min(settings.plan.world_size, 8)) <= room, "main memory of a node"
    check_seconds(make_step_time_inputs(model, settings, planned))
    assert sum(math.prod(shape) for shape in model.shapes().values()) == TOTALS[settings.model.path]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_what_rounds_to_bfloat16_is_corrected_and_nothing_else_is(experiment: str) -> None:
    """RL experiments with bfloat16 in the model or the engine use the token_tis correction, and all
    others use none. bfloat16 RL experiments are exactly the GPU recipes.
    """
    settings = settings_of(f"experiment={experiment}")
    rounds = settings.stage == "rl" and "bfloat16" in (settings.model.dtype, settings.engine.dtype)
    assert settings.algo.rollout_correction == ("token_tis" if rounds else "none")
    assert rounds == (experiment in RECIPES)


SEED_TABLE = {"2B": (64, 128, 8), "7B": (64, 128, 16), "from 14B on": (128, 256, 32)}
"""Table in the Lewis game's README, by model size: rank and alpha of the LoRA adapters, and the
prompts that each of two GPUs accumulates.
"""


@pytest.mark.parametrize("size", SEED_TABLE)
@pytest.mark.parametrize("who", ["speaker", "listener"])
def test_the_lewis_games_table_as_the_recipe_tells_it(who: str, size: str) -> None:
    """The overrides in the recipe's header comment compose to the values of the README's table. All
    sizes pass the size checks, and sizes up to 7B fit the GPUs.
    """
    head = (ROOT / "configs" / "experiment" / "lewis_listener_7b_h100x4.yaml").read_text()
    (line,) = re.findall(rf"^#   {size}: (.+?)(?: \(.+\))?$", head, re.MULTILINE)
    words = line.replace("FOLDER", "Qwen/Qwen3-VL-32B-Instruct").split()
    settings = settings_of(f"experiment=lewis_{who}_7b_h100x4", *words)
    rank, alpha, accumulated = SEED_TABLE[size]
    assert (settings.lora.rank, settings.lora.alpha, settings.batch.prompts_per_step) == (rank, alpha, 2 * accumulated)
    assert size.startswith("from") or f"Qwen2-VL-{size}-" in settings.model.path
    model = load_known_spec(settings.model.path)
    check_sizes(settings, model, settings.plan.world_size)
    if not size.startswith("from"):
        assert plan_gpu_memory(model, settings, world_size=settings.plan.world_size, has_values=False, uses_sandbox=False).fits


def test_lewis_recipes_keep_every_prediction_and_draw_the_speakers_games() -> None:
    """The prediction log and the speaker's game sheets are written below run.dir, even if run.dir
    is changed.
    """
    for who in ("speaker_7b_h100x4", "listener_7b_h100x4", "listener_cpu", "cpu"):
        given = settings_of(f"experiment=lewis_{who}", "run.dir=elsewhere").task.options
        assert given.log == "elsewhere/predictions.jsonl"
        assert who.startswith("listener") or given.sheets == "elsewhere/sheets"


def test_the_documented_rounds_are_those_that_were_measured() -> None:
    """The commands in docs/lewis.md use the same number of queries as benchmarks/lewis.py, and the
    number of warm-start demonstrations is 309 objects times the first of these numbers.
    """
    told = re.findall(r"make_lewis.py .*--distractors random --queries (\d+)", (ROOT / "docs" / "lewis.md").read_text())
    assert told == re.findall(r'make\("make_lewis", .*"--queries", "(\d+)"', (ROOT / "benchmarks" / "lewis.py").read_text()) == ["6", "1"]
    assert settings_of("experiment=lewis_speaker_sft_cpu").sft.num_demonstrations == 309 * int(told[0])


SLOWEST = 50
"""Lower bound on tokens per second for one of the 64 to 128 running sequences of an engine:
estimates are 50 to 70 for 7B on an H200.
"""


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_episode_that_rambles_ends_long_before_others_stop_waiting(recipe: str) -> None:
    """All ranks wait for the last episode of a step. A recipe sets a time limit exactly if an
    episode can sample for longer than five minutes. The limit is at least twice the time that its
    tokens take, and at most a quarter of parallel.straggler_timeout_s.
    """
    settings = settings_of(f"experiment={recipe}")
    task, most = settings.task, settings.engine.max_model_len
    longest = min(task.max_turns * task.max_new_tokens, most) / SLOWEST
    assert (task.max_seconds > 0) == (longest > 300), (recipe, longest)
    assert task.max_seconds == 0 or 2 * longest <= task.max_seconds <= settings.parallel.straggler_timeout_s / 4


@pytest.mark.parametrize(("tp", "pp", "vpp"), [(1, 4, 1), (2, 2, 7), (4, 2, 1), (4, 7, 2)])
def test_every_share_of_other_layouts(tp: int, pp: int, vpp: int) -> None:
    """All ranks together hold the model once, except that every tensor-parallel rank holds the
    unsharded tensors. Each rank's count equals the count from the Hugging Face shapes.
    """
    layout = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.vpp={vpp}", f"parallel.sequence_parallel={tp > 1}"]
    settings = settings_of("experiment=codev_7b_h200x8", *layout)
    model = load_known_spec(settings.model.path)
    planned = plan_gpu_memory(model, settings, world_size=56)
    expected = shares_of(settings)
    for rank in planned.ranks:
        assert rank.rank_share.num_params == expected[rank.rank_share.pp_rank]
    sizes = {name: math.prod(shape) for name, shape in model.shapes().items()}
    whole = sum(size for name, size in sizes.items() if name.startswith("visual.") or name.endswith(WHOLE))
    assert sum(rank.rank_share.num_params for rank in planned.ranks) == sum(sizes.values()) + (tp - 1) * whole


@pytest.mark.parametrize(
    ("name", "tp", "pp", "vpp"),
    [
        ("Qwen2-VL-2B", 2, 2, 7), ("Qwen2-VL-7B", 4, 2, 1), ("Qwen2-VL-72B", 8, 2, 1),
        ("Qwen3-VL-2B", 8, 1, 1), ("Qwen3-VL-4B", 2, 2, 3), ("Qwen3-VL-8B", 1, 4, 3), ("Qwen3-VL-32B", 4, 2, 1),
    ],
)  # fmt: skip
def test_every_share_of_other_families(name: str, tp: int, pp: int, vpp: int) -> None:
    """Each rank's count equals the count from the Hugging Face shapes; the last stage has a copy of
    tied embeddings.
    """
    layout = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.vpp={vpp}", f"parallel.sequence_parallel={tp > 1}"]
    settings = settings_of("experiment=codev_7b_h200x8", f"model.path=Qwen/{name}-Instruct", *layout)
    model, expected = load_known_spec(settings.model.path), shares_of(settings)
    check_sizes(settings, model, tp * pp)
    held = compute_model_shares(model, settings, world_size=tp * pp)
    assert [(rank.pp_rank, rank.tp_rank) for rank in held] == list(product(range(pp), range(tp)))
    assert [rank.num_params for rank in held] == [expected[rank.pp_rank] for rank in held]


def test_a_dry_run_as_a_user_calls_it() -> None:
    ended = fork_server.run_script(ROOT / "launch" / "train.py", "experiment=pyvision_image_7b_h200x8", "plan.only=true", timeout_s=120)
    assert ended.returncode == 0
    text = ended.stdout
    assert "4,484,460,544" in text
    assert re.search(r"\d+ s per step expected on 8 h200: rollout [\d.]+ .*; 3 of [0-9]+ constants were measured", text)
    assert re.search(r"fits: [\d.]+ GB of the usable 126.9 GB, which is 90% of a h200; 8 GPUs", text)
