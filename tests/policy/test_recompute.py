"""Recomputation of a part of the layers (parallel.recompute_num_layers)."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.config import AlgoSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout, check_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.renderer import Renderer
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.packed_example import make_example_items
from tests.support.single_process_policy import close_with_world, single_process_world

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_checkpoint(folder, preset="nano", init="random", seed=1, layers=NUM_LAYERS)
    return folder


@pytest.fixture
def world() -> Iterator[None]:
    with single_process_world():
        yield


def update(model: Path, parallel: ParallelSettings) -> tuple[dict[str, torch.Tensor], Counter[int]]:
    """Return the weights after an update on one micro-batch, and how often each layer ran."""
    settings, calls = ModelSettings(path=str(model), dtype="float32"), Counter()
    renderer = Renderer(settings)
    policy = close_with_world(Policy(
        settings, build_layout(parallel, seed=0), special_tokens=renderer.special_tokens,
        training=TrainingSettings(parallel=parallel, optim=OptimSettings(lr=1e-2), num_steps=2),
    ))  # fmt: skip
    for number, layer in enumerate(policy.network.chunks[0].language.decoder.layers):
        layer.register_forward_pre_hook(partial(lambda number, *_: calls.update([number]), number))
    policy.update(policy.pack(make_example_items(renderer), max_tokens=10_000), make_policy_objective(AlgoSettings()), step=0)
    return {name: tensor.clone() for name, tensor in policy.hf_weights()}, calls


@pytest.mark.parametrize(("number", "expected"), [(0, {0: 2, 1: 2, 2: 2}), (1, {0: 2, 1: 1, 2: 1}), (2, {0: 2, 1: 2, 2: 1})])
def test_the_first_layers_run_twice_and_nothing_else_changes(number: int, expected: dict[int, int], model: Path, world: None) -> None:
    """Weights after an update equal those without recomputation."""
    plain, calls = update(model, ParallelSettings())
    assert calls == {0: 1, 1: 1, 2: 1}
    found, calls = update(model, ParallelSettings(recompute="full", recompute_num_layers=number))
    assert calls == expected
    for name, weight in plain.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6)


def test_impossible_numbers_are_refused(model: Path) -> None:
    for kind in ("none", "vision", "selective"):
        with pytest.raises(ValueError, match="parallel.recompute_num_layers=1: requires parallel.recompute=full"):
            ParallelSettings(recompute=kind, recompute_num_layers=1)
    with pytest.raises(ValueError, match="must not be negative"):
        ParallelSettings(recompute="full", recompute_num_layers=-1)
    parallel = ParallelSettings(recompute="full", recompute_num_layers=NUM_LAYERS + 1)
    with pytest.raises(ValueError, match=r"parallel.recompute_num_layers=4: .*\(3\)"):
        check_layout(parallel, read_spec(model), 1)
