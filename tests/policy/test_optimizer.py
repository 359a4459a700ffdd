"""The learning rate of every step against values computed by hand, and the effect of weight decay
on each kind of parameter."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.config import OptimSettings
from megatron_rl.policy.optimizer import build_schedule
from megatron_rl.policy.optimizer_state import reset_optimizer_state
from megatron_rl.types import LossInputs, LossMetrics
from tests.support.packed_example import make_example_items
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world


@pytest.fixture
def world() -> Iterator[None]:
    with single_process_world():
        yield


def rates(*, num_steps: int, **optim: object) -> list[float]:
    """Return the learning rate of each step.

    Steps are evaluated in order and again out of order, because the schedule depends on the step
    only.
    """
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    schedule = build_schedule(optimizer, OptimSettings(**optim), num_steps)
    found = {}
    for step in [*range(num_steps), 0, num_steps - 1]:
        schedule.num_steps = step + 1
        schedule.step(0)
        found.setdefault(step, schedule.get_lr({}))
        assert found[step] == schedule.get_lr({}) == optimizer.param_groups[0]["lr"]
    return [found[step] for step in range(num_steps)]


def test_a_constant_rate_after_its_warm_up() -> None:
    """The constant schedule rises linearly during the warm-up and then stays."""
    assert rates(num_steps=6, lr=1.0, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert rates(num_steps=3, lr=1.0) == [1.0, 1.0, 1.0]


def test_a_linear_fall_to_the_step_after_the_last() -> None:
    """The linear schedule falls from its peak towards min_lr, which it would reach one step after
    the last."""
    # The peak is at step 2 of 10. Nine steps later, at step 11, the rate would be 0.1, so it falls
    # by 0.1 per step.
    expected = [0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    assert rates(num_steps=10, lr=1.0, warmup_steps=2, schedule="linear", min_lr=0.1) == pytest.approx(expected)


def test_a_cosine_fall_teaches_in_every_step() -> None:
    """The cosine schedule starts at its peak and is positive in every step."""
    # Without a warm-up the first step has the peak: cos(0), cos(pi/4), cos(pi/2), cos(3 pi/4).
    # The next would be cos(pi).
    half = 0.5 * 2**-0.5
    assert rates(num_steps=4, lr=1.0, schedule="cosine") == pytest.approx([1.0, 0.5 + half, 0.5, 0.5 - half])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_one_step_alone_trains_at_its_peak(schedule: str) -> None:
    """A run of one step uses the peak learning rate."""
    assert rates(num_steps=1, lr=0.5, schedule=schedule) == [0.5]


def nothing(rows: LossInputs) -> tuple[torch.Tensor, LossMetrics]:
    """Return a loss without a gradient, so that only weight decay changes the parameters."""
    return 0.0 * rows.logprob_R.sum(), LossMetrics(sums={}, maxima={})


@pytest.mark.parametrize("part_lr", [{}, {"vision": 0.05, "merger": 0.025}], ids=["one rate", "own rates"])
def test_weight_decay_takes_matrices_by_their_rate_and_spares_biases_and_norms(world: None, random_model: Path, part_lr: dict) -> None:
    """AdamW reduces a matrix by lr * weight_decay of itself and does not change biases and norms,
    with and without learning rates per part."""
    policy, renderer = make_policy_and_renderer(random_model, OptimSettings(lr=0.1, weight_decay=0.5, lr_by_module=part_lr))
    before = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    policy.update(policy.pack(make_example_items(renderer), max_tokens=10_000), nothing, step=0)
    decayed = set()
    for name, after in policy.hf_weights():
        part = "merger" if name.startswith("visual.merger") else "vision" if name.startswith("visual") else "language"
        expected = 1.0 if after.dim() == 1 else 1.0 - 0.5 * part_lr.get(part, 0.1)
        torch.testing.assert_close(after, before[name] * expected, rtol=1e-6, atol=0)
        decayed.add((part, after.dim() > 1, torch.equal(after, before[name])))
    assert decayed == {(part, matrix, not matrix) for part in ("merger", "vision", "language") for matrix in (True, False)}


def test_the_step_decides_the_rate_however_many_updates_it_makes(world: None, random_model: Path) -> None:
    """The learning rate depends on the step, not on the number of updates."""
    policy, renderer = make_policy_and_renderer(random_model, OptimSettings(lr=0.1, schedule="linear"), num_steps=4)
    batches = policy.pack(make_example_items(renderer), max_tokens=10_000)
    assert [policy.update(batches, nothing, step=step)["lr"] for step in (0, 0, 2, 3)] == pytest.approx([0.1, 0.1, 0.05, 0.025])
    assert policy.network.num_updates == 4


def test_one_kernel_updates_the_parameters(world: None, random_model: Path) -> None:
    """AdamW runs torch's fused kernel, also after its state was reset."""
    policy, renderer = make_policy_and_renderer(random_model, OptimSettings(lr=0.1))
    batches = policy.pack(make_example_items(renderer), max_tokens=10_000)
    for step in range(2):
        with torch.profiler.profile() as seen:
            policy.update(batches, nothing, step=step)
        called = {event.key for event in seen.key_averages()}
        assert "aten::_fused_adamw_" in called
        assert not {"aten::_foreach_addcdiv_", "aten::addcdiv_"} & called
        reset_optimizer_state(policy.network.optimizer)


def test_a_closed_policy_leaves_no_thread_behind(random_model: Path) -> None:
    """Closing a policy ends all its threads.

    Every process group has a thread that wakes a hundred times per second; 1,400 of them once made
    all tests three times slower.
    """

    def num_threads() -> int:
        with single_process_world():
            make_policy_and_renderer(random_model, OptimSettings())
            in_use = len(os.listdir("/proc/self/task"))
        gc.collect()
        assert in_use > len(os.listdir("/proc/self/task")) + 20, "the check has lost its object"
        return len(os.listdir("/proc/self/task"))

    assert num_threads() == num_threads()
