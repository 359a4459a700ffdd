"""Replays and records experts in several parallel layouts. Run under torchrun by
test_routing_replay.py.

    routing_layouts.py MODELS OUT LAYOUT ...

Layouts are written as for parallel_layouts.py. OUT/experts.pt contains the experts of each example
sequence, [L, sparse layers, top_k].
"""

from functools import partial
from pathlib import Path

import torch

from megatron_rl.batching.minibatches import PackItem
from megatron_rl.batching.packing import scatter_to_rollouts
from megatron_rl.distributed.world import all_gather_object
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.policy.routed_experts import RoutingFormat, gather_routed_experts
from megatron_rl.types import MicroBatch, Rollout
from tests.support.parallel_layouts import LayoutCase, compute_gradients, destroy_layout, main, make_example, make_policy, weighted_nll


def to_rollouts(items: list[PackItem], experts: list[torch.Tensor]) -> tuple[list[Rollout], list[PackItem]]:
    """Return the sequences with experts for all tokens but the last, as rollouts and pack items."""
    rollouts, packed = [], []
    for number, (item, chosen) in enumerate(zip(items, experts, strict=True)):
        item.sequence.routed_experts = [row.numpy().tobytes() for row in chosen.byte()[:-1]]
        rollouts.append(Rollout(task="t", example_id=str(number), group=0, sample_index=number, sequences=[item.sequence]))
        packed.append(PackItem(item.sequence, item.weight, denominator=item.denominator, origin=(number, 0)))
    return rollouts, packed


def pack_with_experts(policy: Policy, rollouts: list[Rollout], items: list[PackItem], *, max_tokens: int) -> list[MicroBatch]:
    batches = policy.pack(items, max_tokens=max_tokens)
    for batch in batches:
        batch.routed_experts_TLK = gather_routed_experts(rollouts, batch, RoutingFormat.from_spec(policy.spec))
    return batches


def logprobs_by_rollout(policy: Policy, rollouts: list[Rollout], batches: list[MicroBatch]) -> dict[int, list[float]]:
    """Return the logprobs of the rollouts of all ranks."""
    found = scatter_to_rollouts(rollouts, batches, policy.logprobs(batches))
    return {rollout: column for each in all_gather_object(found) for (rollout, _), column in each.items()}


def run_layout(models: Path, out: Path, text: str) -> None:
    case = LayoutCase.parse(text)
    layout = build_layout(case.parallel_settings(), seed=0)
    renderer, items = make_example(models / case.model)
    rollouts, items = to_rollouts(items, torch.load(out / "experts.pt", weights_only=True))
    policy = make_policy(models / case.model, renderer, layout, case, lr=0.0, eps=1e-4)
    pack = partial(pack_with_experts, policy, rollouts, items)
    result: dict[str, object] = {}
    for cut, max_tokens in (("one", 10_000), ("each", 1)):
        result[f"logprobs_{cut}"] = logprobs_by_rollout(policy, rollouts, pack(max_tokens=max_tokens))
        result[f"gradients_{cut}"] = compute_gradients(policy, pack(max_tokens=max_tokens))
    assert policy.routing is not None
    result["metrics"] = policy.update(pack(max_tokens=1), weighted_nll, step=0)
    batches = policy.pack(items, max_tokens=400)
    result["own"] = logprobs_by_rollout(policy, rollouts, batches)
    with policy.routing.recording(batches):
        result["recorded"] = logprobs_by_rollout(policy, rollouts, batches)
    with torch.no_grad():
        for name, parameter in policy.network.chunks.named_parameters():
            if name.endswith("router.weight"):
                parameter.neg_()  # every token would choose other experts now
    result["changed_metrics"] = policy.update(batches, weighted_nll, step=0)
    with policy.routing.disabled():
        result["changed_disabled"] = logprobs_by_rollout(policy, rollouts, batches)
    for batch in batches:
        batch.routed_experts_TLK = None
    result["changed_own"] = logprobs_by_rollout(policy, rollouts, batches)
    if layout.is_last_stage and layout.tp_rank == 0 and layout.dp_rank == 0:
        torch.save(result, out / f"{text}.pt")
    destroy_layout(policy)


if __name__ == "__main__":
    main(run_layout)
