"""Megatron's optimizer on the host (parallel.offload_optimizer), tested without a GPU on copies as
made for GPU parameters.

Stubs replace everything that needs a device: streams, pinned memory, and the check that a parameter
is on CUDA.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.config import AlgoSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.policy import network, optimizer
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


class Stream:
    """A stub of a CUDA stream on which all work is already done."""

    def wait_stream(self, other: "Stream") -> None: ...

    def record_event(self) -> "Stream":
        return self

    def wait(self, other: "Stream") -> None: ...

    def synchronize(self) -> None: ...


def copied(self: HybridDeviceOptimizer, fraction: float) -> tuple:
    """Give every parameter a copy that is stepped, as hybrid_optimizer.py does for CUDA parameters
    at a fraction of 1."""
    assert fraction == 1.0
    copies = {param: param.detach().clone() for group in self.param_groups for param in group["params"]}
    groups = [group | {"params": [copies[param] for param in group["params"]]} for group in self.param_groups if group["params"]]
    return groups, [], copies, {copy: param for param, copy in copies.items()}, {}


@pytest.fixture
def offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the optimizer of every policy built from now on on the host."""
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", copied)
    monkeypatch.setattr(optimizer, "OptimizerConfig", partial(optimizer.OptimizerConfig, pin_cpu_grads=False, pin_cpu_params=False))
    build = optimizer.build_optimizer
    monkeypatch.setattr(network, "build_optimizer", lambda *given, offload, **named: build(*given, offload=True, **named))


def policy_of(model: Path, dtype: str = "bfloat16") -> Policy:
    settings, parallel = ModelSettings(path=str(model), dtype=dtype), ParallelSettings()
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


def bits(policy: Policy) -> dict[str, bytes]:
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in policy.hf_weights()}


def test_a_resumed_run_is_the_unbroken_one(world: None, offloaded: None, random_model: Path, tmp_path: Path) -> None:
    """After two steps and a checkpoint, two more steps give the same weights, bit for bit, in the
    running policy and in a policy resumed from the checkpoint."""
    whole, resumed = policy_of(random_model), policy_of(random_model)
    assert isinstance(whole.network.optimizer.chained_optimizers[0].optimizer, HybridDeviceOptimizer)
    begun = bits(whole)
    for number in range(2):
        step(whole, random_model, number)
    saved = bits(whole)
    whole.save(tmp_path, background=False).finish()
    resumed.load(tmp_path, seed=0)
    assert bits(resumed) == saved != begun
    for number in range(2, 4):
        for policy in (whole, resumed):
            step(policy, random_model, number)
        assert bits(resumed) == bits(whole)
    assert bits(whole) != saved


def test_the_first_of_two_that_megatron_builds_is_gone(world: None, offloaded: None, random_model: Path) -> None:
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


def test_it_steps_as_the_optimizer_on_the_device_does(
    world: None, random_model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One step changes the main weights as the optimizer on the device does, to rounding: torch's
    fused AdamW is another kernel."""
    here = policy_of(random_model)
    request.getfixturevalue("offloaded")
    there = policy_of(random_model)
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
    here = policy_of(random_model)
    request.getfixturevalue("offloaded")
    there = policy_of(random_model)
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


def test_its_kernel_is_the_fused_one(world: None, offloaded: None, random_model: Path) -> None:
    """The optimizer uses the fused AdamW kernel, which Megatron requests (0.16.1,
    optimizer/__init__.py). The optimizer on the device in the test above does not use it."""
    (part,) = policy_of(random_model).network.optimizer.chained_optimizers
    assert all(group["fused"] for inner in part.optimizer.cpu_optimizers for group in inner.param_groups)


def test_moments_that_are_forgotten_are_forgotten_on_the_host(world: None, offloaded: None, random_model: Path) -> None:
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


def test_it_takes_main_weights_alone(world: None, offloaded: None, random_model: Path) -> None:
    """float32 parameters are rejected: megatron-core 0.16.1 cannot offload their optimizer, because
    their main weights are views of the parameters."""
    with pytest.raises(ValueError, match="parallel.offload_optimizer=True: needs model.dtype=bfloat16"):
        policy_of(random_model, "float32")
