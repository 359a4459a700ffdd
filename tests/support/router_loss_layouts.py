"""Adds the losses of routers to updates in several parallel layouts. Run under torchrun by
test_router_losses.py.

    router_loss_layouts.py MODELS OUT LAYOUT ...

Layouts are written as for parallel_layouts.py. If OUT/experts.pt exists, it contains the experts of
each example sequence for routing replay, [L, sparse layers, top_k].
"""

from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.batching.minibatches import PackItem
from megatron_rl.config import ModelSettings, OptimSettings
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.types import MicroBatch
from tests.support.parallel_layouts import LayoutCase, compute_gradients, destroy_layout, main, make_example, weighted_nll
from tests.support.routing_layouts import pack_with_experts, to_rollouts

COEFS = (1.0, 0.1)
"""Coefficients of the load-balancing loss and of the z loss."""


def compute_update(policy: Policy, batches: list[MicroBatch]) -> dict[str, dict]:
    """Return the gradients and the losses of an update."""
    assert policy.router_losses is not None
    with policy.router_losses.added_to(batches, policy.network.pipeline.visit):
        gradients = compute_gradients(policy, batches)
    return {"gradients": gradients, "metrics": policy.router_losses.metrics()}


def run_layout(models: Path, out: Path, text: str) -> None:
    case = LayoutCase.parse(text)
    layout = build_layout(case.parallel_settings(), seed=0)
    renderer, items = make_example(models / case.model)
    training = TrainingSettings(parallel=case.parallel_settings(), optim=OptimSettings(lr=0.0), num_steps=3, router_loss_coefs=COEFS)
    policy = Policy(
        ModelSettings(path=str(models / case.model), dtype="float32"), layout,
        training=training, special_tokens=renderer.special_tokens, temperature=0.7, bucket_mib=case.bucket_mib,
    )  # fmt: skip
    plain: list[PackItem] = [replace(item) for item in items]
    result: dict[str, object] = {}
    for cut, max_tokens in (("one", 10_000), ("each", 1)):
        result[cut] = compute_update(policy, policy.pack(plain, max_tokens=max_tokens))
    result["updated"] = policy.update(policy.pack(plain, max_tokens=400), weighted_nll, step=0)
    result["head_only"] = policy.update(policy.pack(plain, max_tokens=400), weighted_nll, step=0, value_head_only=True)
    if (out / "experts.pt").exists():
        rollouts, replayed = to_rollouts(items, torch.load(out / "experts.pt", weights_only=True))
        result["replayed"] = compute_update(policy, pack_with_experts(policy, rollouts, replayed, max_tokens=400))
    if layout.is_last_stage and layout.tp_rank == 0 and layout.dp_rank == 0:
        torch.save(result, out / f"{text}.pt")
    destroy_layout(policy)


if __name__ == "__main__":
    main(run_layout)
