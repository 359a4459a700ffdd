"""Runs the same updates with gradient reductions after the backward pass and overlapped with it.
Run under torchrun by test_overlap.py.

    grad_reduce_overlap_world.py MODEL OUT
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.algo.value import make_value_objective, shared_value_loss, warmup_value_loss
from megatron_rl.config import AlgoSettings, CriticSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.distributed.world import all_gather_object, connect, read_world
from megatron_rl.policy import optimizer
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.renderer import Renderer
from tests.support.packed_example import make_example_items

UPDATES = ("pictures", "pictures", "words", "pictures", "head", "pictures")
"""Kind of each update: on the rank with the only sequence without images, the last micro-batch has
images or only text ("words"); "head" updates only the value head.
"""
CRITIC = CriticSettings(head_sizes=[4])


def run_updates(model: Path, parallel: ParallelSettings) -> dict[str, object]:
    renderer, layout = Renderer(ModelSettings(path=str(model))), build_layout(parallel, seed=0)
    policy = Policy(
        ModelSettings(path=str(model)), layout,
        training=TrainingSettings(parallel=parallel, optim=OptimSettings(lr=0.01, eps=1e-4, clip_grad=1e9), num_steps=9),
        special_tokens=renderer.special_tokens, critic=CRITIC,
    )  # fmt: skip
    batches = policy.pack(make_example_items(renderer), max_tokens=1)
    for batch in batches:
        batch.old_value_T = batch.return_T = torch.ones_like(batch.weight_T)
    of_policy, of_values = make_policy_objective(AlgoSettings()), make_value_objective(CRITIC, level="tokens")
    found: dict[str, object] = {"metrics": [], "early": [], "words": all_gather_object([batch.grid_I3.shape[0] == 0 for batch in batches])}
    for step, last in enumerate(UPDATES):
        batches.sort(key=lambda batch, last=last: (batch.grid_I3.shape[0] == 0) == (last == "words"))
        early: list[int] = []
        record_early_reductions(policy, early)
        loss = warmup_value_loss(of_policy, of_values) if last == "head" else shared_value_loss(of_policy, of_values, 0.25)
        found["metrics"].append(policy.update(batches, loss, step=step, value_head_only=last == "head"))
        found["early"].append(all_gather_object(len(early)))
    weights = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    buckets = sum(len(buffer.buckets) for chunk in policy.network.model for buffer in chunk.buffers)
    return {**found, "weights": weights, "buckets": buckets}


def record_early_reductions(policy: Policy, early: list[int]) -> None:
    """Append to `early` for every bucket whose reduction starts before the backward passes of all
    micro-batches have finished.
    """
    start, finalize = _START, policy.network.chunks[0].config.finalize_model_grads_func
    is_through: list[bool] = []

    def started(self: _ParamAndGradBucketGroup, **options: object) -> object:
        if not is_through:
            early.append(1)
        return start(self, **options)

    def finalized(*arguments: object, **options: object) -> None:
        is_through.append(True)
        policy.network.chunks[0].config.finalize_model_grads_func = finalize
        finalize(*arguments, **options)

    _ParamAndGradBucketGroup.start_grad_sync = started
    policy.network.chunks[0].config.finalize_model_grads_func = finalized


_START: Callable = _ParamAndGradBucketGroup.start_grad_sync


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    connect(read_world(), timeout_s=60)
    whole = optimizer.DistributedDataParallelConfig
    result = {"after": run_updates(model, ParallelSettings())}
    optimizer.DistributedDataParallelConfig = partial(whole, bucket_size=20_000)
    result["beside"] = run_updates(model, ParallelSettings(overlap_grad_reduce=True))
    if dist.get_rank() == 0:
        torch.save(result, out / "overlap.pt")


if __name__ == "__main__":
    main()
