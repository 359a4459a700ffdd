"""A non-finite value stops an update before any weight changes, and the error names the value."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.config import AlgoSettings, OptimSettings
from megatron_rl.errors import NonFiniteValue
from megatron_rl.policy.loss_metrics import _add, _update_maxima
from megatron_rl.policy.policy import Policy
from megatron_rl.types import LossInputs, LossMetrics, MicroBatch
from tests.support.packed_example import make_example_items
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world


@pytest.fixture
def world() -> Iterator[None]:
    with single_process_world():
        yield


def built(model: Path, **optim: float) -> tuple[Policy, list[MicroBatch]]:
    """Build a policy, and pack the example into several micro-batches."""
    policy, renderer = make_policy_and_renderer(model, OptimSettings(**optim))
    batches = policy.pack(make_example_items(renderer), max_tokens=200)
    assert len(batches) > 2
    return policy, batches


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.hf_weights()}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.cpu().numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("column", "name"), [("rollout_logprob_T", "the engine's logprob"), ("advantage_T", "the advantage")])
def test_what_came_in_is_named_with_its_micro_batch(world: None, random_model: Path, column: str, name: str, bad: float) -> None:
    """A non-finite engine logprob or advantage stops the update with an error that names the column
    and its micro-batch."""
    policy, batches = built(random_model, lr=1e-3)
    values = {"rollout_logprob_T": batches[1].rollout_logprob_T, "advantage_T": batches[1].advantage_T}[column]
    values[batches[1].mask_T.nonzero()[3, 0]] = bad
    before = bits(weights(policy))
    with pytest.raises(NonFiniteValue, match=f"rank 0, micro-batch 1: {name} is not finite"):
        policy.update(batches, make_policy_objective(AlgoSettings()), step=0)
    assert bits(weights(policy)) == before and policy.network.num_updates == 0


def test_a_broken_weight_is_seen_in_the_trainers_logprob(world: None, random_model: Path) -> None:
    """A NaN weight stops the update with an error that names the trainer's logprob."""
    policy, batches = built(random_model, lr=1e-3)
    with torch.no_grad():
        next(p for name, p in policy.network.chunks.named_parameters() if "linear_fc2" in name)[0, 0] = math.nan
    before = bits(weights(policy))
    with pytest.raises(NonFiniteValue, match="rank 0, micro-batch 0: the trainer's logprob is not finite"):
        policy.update(batches, make_policy_objective(AlgoSettings()), step=0)
    assert bits(weights(policy)) == before


def test_a_gradient_that_overflows_names_its_parameter(world: None, random_model: Path) -> None:
    """A gradient that overflows is reported with its parameter.

    The loss is finite, because its value cancels while its gradient does not.
    """
    policy, batches = built(random_model, lr=1e-3)

    def steep(rows: LossInputs) -> tuple[torch.Tensor, LossMetrics]:
        scaled = (3e38 * (rows.logprob_R - rows.logprob_R.detach())).sum()
        return scaled, LossMetrics(sums={}, maxima={})

    before = bits(weights(policy))
    with pytest.raises(NonFiniteValue, match=r"rank 0, the gradient of \S+ is not finite"):
        policy.update(batches, steep, step=0)
    assert bits(weights(policy)) == before


def test_an_infinite_loss_is_one(world: None, random_model: Path) -> None:
    """An infinite loss stops the update with an error."""
    policy, batches = built(random_model, lr=1e-3)
    with pytest.raises(NonFiniteValue, match="rank 0, micro-batch 0: the loss is inf"):
        policy.update(batches, lambda rows: (rows.logprob_R.sum() + math.inf, LossMetrics(sums={}, maxima={})), step=0)


def test_weights_that_an_update_broke_are_never_served(world: None, random_model: Path) -> None:
    """If an update makes the weights non-finite, it raises."""
    policy, batches = built(random_model, lr=1e37, weight_decay=1.0)
    with pytest.raises(NonFiniteValue, match="weights are not finite after update 1: lower optim.lr"):
        policy.update(batches, make_policy_objective(AlgoSettings()), step=0)


@pytest.mark.parametrize("order", [(5.0, math.nan, 0.2), (math.nan, 0.1), (0.1, math.nan)])
def test_a_maximum_keeps_nan(order: tuple[float, ...]) -> None:
    """A maximum metric that was NaN once stays NaN; sums and maxima are merged by name."""
    maxima: dict[str, float] = {}
    for value in order:
        _update_maxima(maxima, {"gap": value})
    assert math.isnan(maxima["gap"])
    _add(sums := {"a": 1.0}, {"a": 2.0, "b": 4.0})
    _update_maxima(maxima := {"gap": -math.inf}, {"gap": 0.5})
    assert (sums, maxima) == ({"a": 3.0, "b": 4.0}, {"gap": 0.5})
