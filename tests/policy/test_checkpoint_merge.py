"""Merges of checkpoints in parallel layouts, against the textbook formulas on exported
checkpoints, in float64 and one tensor of the whole model at a time.

The checkpoints differ by optimizer updates. The vocabulary has 1,027 ids, which no tensor-parallel
size divides, and the embeddings are tied, so that two pipeline stages hold copies of them.
"""

from pathlib import Path

import pytest
import torch

from megatron_rl.config import MergeSettings, OptimSettings
from megatron_rl.policy.checkpoint_merge import CheckpointMerge
from megatron_rl.policy.ties import find_threshold
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT
from tests.support.indivisible_vocabulary import add_tokens
from tests.support.merge_layouts import MERGES, NUM_CHECKPOINTS, SAVED
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world

Weights = dict[str, torch.Tensor]
LAYOUTS = {"full": ("2,2,1,1,none,full", "1,2,2,0,none,full"), "lora": ("2,1,1,0,none,lora", "1,1,1,0,none,lora")}
"""The layout that trains and saves, and a layout that loads."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, torchrun) -> dict[str, tuple[dict, dict]]:  # noqa: ANN001
    folder = tmp_path_factory.mktemp("merges")
    make_checkpoint(folder / "tied", init="random", seed=1, heads=8, kv_heads=4, tied=True)
    model = add_tokens(folder / "tied", folder / "odd")
    torchrun(4, SUPPORT / "merge_layouts.py", model, folder, *(layout for layouts in LAYOUTS.values() for layout in layouts))
    return {name: tuple(torch.load(folder / f"{layout}.pt") for layout in layouts) for name, layouts in LAYOUTS.items()}


def mean_of(checkpoints: list[Weights], weights: list[float]) -> Weights:
    return {name: sum(w * each[name].double() for w, each in zip(weights, checkpoints, strict=True)) for name in checkpoints[0]}


def ties_of(start: Weights, checkpoints: list[Weights], weights: list[float], density: float, names: list[str]) -> Weights:
    """Return the TIES merge (arXiv 2306.01708, algorithm 1) with a weight for each checkpoint."""
    changes = []
    for each in checkpoints:
        change = torch.cat([(each[name] - start[name]).flatten() for name in names]).double()
        limit = change.abs().sort(descending=True).values[int(density * len(change)) - 1]
        assert (change.abs() == limit).sum() <= 2, "the trim is unambiguous"
        changes.append(change * (change.abs() >= limit))
    stacked, weight = torch.stack(changes), torch.tensor(weights, dtype=torch.float64)[:, None]
    elected = torch.sign((weight * stacked).sum(0))
    agrees = weight * (torch.sign(stacked) == elected) * (stacked != 0)
    merged = (agrees * stacked).sum(0) / agrees.sum(0).clamp(min=1e-30)
    parts = merged.split([start[name].numel() for name in names])
    return {n: start[n].double() + p.view(start[n].shape) for n, p in zip(names, parts, strict=True)}


def ema_weights(alpha: float) -> list[float]:
    """Return the weights of three checkpoints: the first merge is the first checkpoint."""
    return [(1 - alpha) ** 2, alpha * (1 - alpha), alpha]


@pytest.mark.parametrize("method", list(MERGES))
@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_a_merge_is_the_textbooks(kind: str, method: str, results: dict[str, tuple[dict, dict]]) -> None:
    """Each weight has an error of at most 1e-6 of the largest weight of its tensor, and the
    weights of the policy are the same bits after the merged weights were loaded."""
    start, *checkpoints = results[kind][0]["checkpoints"]
    settings = MERGES[method]
    assert len(checkpoints) == NUM_CHECKPOINTS == 3 and results[kind][0]["is_kept"]
    weights = ema_weights(settings.alpha) if settings.uses_ema else [1 / 3] * 3
    changed = [name for name in start if not torch.equal(start[name], checkpoints[-1][name])]
    assert len(changed) == len(start) if kind == "full" else 10 < len(changed) < len(start)
    expected = mean_of(checkpoints, weights)
    if settings.uses_ties:
        expected |= ties_of(start, checkpoints, weights, settings.density, changed)
        assert sum((expected[name] != start[name]).sum() for name in changed) < 0.9 * sum(start[name].numel() for name in changed)
    found = results[kind][0]["merged"][method]
    assert found.keys() == expected.keys()
    worst = max(((found[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in expected)
    assert worst <= 1e-6


@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_another_layout_goes_on_with_a_saved_merge(kind: str, results: dict[str, tuple[dict, dict]]) -> None:
    """The loaded merge is equal bit for bit, and the next checkpoint is its fourth."""
    first, again = results[kind]
    assert again["num"] == NUM_CHECKPOINTS
    assert all(torch.equal(again["merged"][name], tensor) for name, tensor in first["merged"][SAVED].items())
    start, *checkpoints = first["checkpoints"]
    settings = MERGES[SAVED]
    weights = [(1 - settings.alpha) * each for each in ema_weights(settings.alpha)] + [settings.alpha]
    changed = [name for name in start if not torch.equal(start[name], checkpoints[-1][name])]
    expected = ties_of(start, [*checkpoints, checkpoints[-1]], weights, settings.density, changed)
    assert max((again["next"][name] - expected[name]).abs().max().item() for name in changed) <= 1e-6


@pytest.mark.long
def test_divided_experts_are_merged(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """With the experts divided between two ranks, the trim of TIES counts each entry once; tensor
    parallelism goes on with the merge.
    """
    make_checkpoint(tmp_path / "moe", family="qwen3_vl_moe", init="random", seed=1, vision_depth=2, layers=3)
    layouts = ("1,1,1,0,none,ep2,full", "2,1,1,1,none,full")
    torchrun(2, SUPPORT / "merge_layouts.py", tmp_path / "moe", tmp_path, *layouts)
    found = {"full": tuple(torch.load(tmp_path / f"{layout}.pt") for layout in layouts)}
    for method in MERGES:
        test_a_merge_is_the_textbooks("full", method, found)
    test_another_layout_goes_on_with_a_saved_merge("full", found)


def test_the_threshold_is_the_kth_largest_magnitude() -> None:
    """Numbers of all magnitudes, with equal ones, zeros and subnormal ones among them."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(5000, generator=generator) * torch.exp2(torch.randint(-140, 100, (5000,), generator=generator).float())
    numbers[::7], numbers[1::7] = 0.0, numbers[2]
    with single_process_world():
        for num_kept in (1, 2, 700, 1400, 4000, 4290, 5000):
            found = find_threshold(lambda: iter(numbers.split(999)), num_kept, torch.distributed.group.WORLD, torch.device("cpu"))
            assert found == numbers.abs().sort(descending=True).values[num_kept - 1]


def test_weights_for_the_engine_stay_when_the_policys_are_back(random_model: Path) -> None:
    """On one process, exported weights are views of the network's, and the receiver still reads the
    last ones when the policy's weights are back. Oracle: the mean of two checkpoints."""
    with single_process_world():
        policy, _ = make_policy_and_renderer(random_model, OptimSettings())
        merge = policy.network.merge = CheckpointMerge(policy.network.chunks, MergeSettings(method="mean"))
        parameters, checkpoints = list(policy.network.chunks.parameters()), []
        for scale in (1.0, 3.0):
            for parameter in parameters:
                parameter.data.mul_(scale)
            merge.add()
            checkpoints.append({name: tensor.clone() for name, tensor in policy.hf_weights()})
        found = dict(list(policy.teacher_weights()))
        assert all(torch.allclose(tensor, 2 * checkpoints[0][name], rtol=1e-6, atol=0) for name, tensor in found.items())
        assert all(torch.equal(tensor, checkpoints[1][name]) for name, tensor in policy.hf_weights())


def test_a_checkpoint_with_another_merge_is_refused(random_model: Path, tmp_path: Path) -> None:
    with single_process_world():
        policy, _ = make_policy_and_renderer(random_model, OptimSettings())
        policy.save(tmp_path, background=False).finish()
        policy.network.merge = CheckpointMerge(policy.network.chunks, MergeSettings(method="mean"))
        with pytest.raises(ValueError, match=f"^run.dir={tmp_path}: contains no merge of checkpoints; resume without distill.merge"):
            policy.load(tmp_path, seed=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "median"}, "distill.merge.method=median: "),
        ({"every": 2}, "distill.merge.every=2: has no effect without distill.merge.method"),
        ({"method": "mean", "alpha": 0.3}, "distill.merge.alpha=0.3: has no effect with distill.merge.method=mean"),
        ({"method": "ema", "density": 0.3}, "distill.merge.density=0.3: has no effect with distill.merge.method=ema"),
        ({"method": "ema", "alpha": 1.0}, "distill.merge.alpha=1.0: must be in"),
        ({"method": "ties", "density": 0.0}, "distill.merge.density=0.0: must be in"),
        ({"method": "mean", "every": 0}, "distill.merge.every=0: must be at least 1"),
    ],
)
def test_settings_without_effect_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        MergeSettings(**given)
