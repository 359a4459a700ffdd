"""Megatron's optimizer on the host (parallel.offload_optimizer). test_resume.py resumes it."""

import gc
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.config import AlgoSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.renderer import Renderer
from tests.support.packed_example import make_example_items
from tests.support.single_process_policy import close_with_world, single_process_world


@pytest.fixture
def world() -> Iterator[None]:
    with single_process_world():
        yield


def policy_of(model: Path, dtype: str = "bfloat16", *, offload: bool = True) -> Policy:
    settings, parallel = ModelSettings(path=str(model), dtype=dtype), ParallelSettings(offload_optimizer=offload)
    renderer = Renderer(settings)
    return close_with_world(
        Policy(
            settings, build_layout(parallel, seed=0),
            training=TrainingSettings(parallel=parallel, optim=OptimSettings(lr=1e-2, weight_decay=0.1), num_steps=9),
            special_tokens=renderer.special_tokens,
        )
    )  # fmt: skip


def step(policy: Policy, model: Path, number: int) -> None:
    contexts = make_example_items(Renderer(ModelSettings(path=str(model))))
    policy.update(policy.pack(contexts, max_tokens=10_000), make_policy_objective(AlgoSettings()), step=number)


def main_weights(policy: Policy) -> list[torch.Tensor]:
    (part,) = policy.network.optimizer.chained_optimizers
    return [main.clone() for group in part.optimizer.param_groups for main in group["params"]]


def test_the_first_of_two_that_megatron_builds_is_gone(world: None, random_model: Path) -> None:
    """The first of the two optimizers that Megatron builds is freed when the policy has been built.

    It pins every parameter and is a reference cycle, so it must be collected explicitly.
    """
    gc.collect()
    before = num_alive()
    gc.disable()
    try:
        policy = policy_of(random_model)
        assert num_alive() - before == 1
    finally:
        gc.enable()
    assert isinstance(policy.network.optimizer.chained_optimizers[0].optimizer, HybridDeviceOptimizer)


def num_alive() -> int:
    return sum(isinstance(each, HybridDeviceOptimizer) for each in gc.get_objects())


def test_it_steps_as_the_optimizer_on_the_device_does(world: None, random_model: Path) -> None:
    """One step changes the main weights as the optimizer on the device does, to rounding: torch's
    fused AdamW is another kernel."""
    here, there = policy_of(random_model, offload=False), policy_of(random_model)
    begun = main_weights(here)
    for policy in (here, there):
        step(policy, random_model, 0)
    for ours, theirs, before in zip(main_weights(there), main_weights(here), begun, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * (theirs - before).norm() > 0


def test_it_steps_on_its_share_of_the_nodes_cores(
    world: None, random_model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The step uses 4 threads with 13 cores and 3 ranks.

    The previous number of threads is restored afterwards, also after a failure. An optimizer on the
    device does not change it.
    """
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    here, there = policy_of(random_model, offload=False), policy_of(random_model)
    (part,) = there.network.optimizer.chained_optimizers
    (inner,) = part.optimizer.cpu_optimizers
    seen: list[int] = []
    inner.register_step_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(13)))
    monkeypatch.setattr(os, "cpu_count", lambda: 13)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    step(there, random_model, 0)
    assert (seen, torch.get_num_threads()) == ([4], 1)
    torch.set_num_threads(5)
    step(there, random_model, 1)
    assert seen == [4, 5], "a user's own number is not lowered"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(part.optimizer, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(there, random_model, 2)
    assert torch.get_num_threads() == 5
    monkeypatch.setattr(torch, "set_num_threads", None)
    step(here, random_model, 0)


def test_its_kernel_is_the_fused_one(world: None, random_model: Path) -> None:
    """The optimizer uses the fused AdamW kernel, which Megatron requests (0.16.1,
    optimizer/__init__.py)."""
    (part,) = policy_of(random_model).network.optimizer.chained_optimizers
    assert all(group["fused"] for inner in part.optimizer.cpu_optimizers for group in inner.param_groups)


def test_moments_that_are_forgotten_are_forgotten_on_the_host(world: None, random_model: Path) -> None:
    """After a critic's warm-up, restarting the optimizer resets its state on the host and keeps the
    main weights."""
    warm = policy_of(random_model)
    step(warm, random_model, 0)
    (part,) = warm.network.optimizer.chained_optimizers
    (inner,) = part.optimizer.cpu_optimizers
    assert all(state["step"] == 1 and state["exp_avg"].any() for state in inner.state.values())
    kept = main_weights(warm)
    warm.restart_optimizer()
    assert all(state["step"] == 0 and not (state["exp_avg"].any() or state["exp_avg_sq"].any()) for state in inner.state.values())
    assert all(map(torch.equal, kept, main_weights(warm)))
    assert len(inner.state) == len(kept)


def test_it_takes_main_weights_alone(world: None, random_model: Path) -> None:
    """float32 parameters are rejected: megatron-core 0.16.1 cannot offload their optimizer, because
    their main weights are views of the parameters."""
    with pytest.raises(ValueError, match="parallel.offload_optimizer=True: needs model.dtype=bfloat16"):
        policy_of(random_model, "float32")
