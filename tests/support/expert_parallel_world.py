"""Trains a model with experts with very different shares of two data-parallel ranks. Run under
torchrun by test_expert_parallel.py.

    expert_parallel_world.py MODEL OUT
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.compat.megatron_cpu import megatron_on_cpu
from megatron_rl.config import ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.distributed.world import all_gather_object, connect, read_world
from megatron_rl.policy import optimizer
from megatron_rl.policy.experts import set_num_rows
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from tests.support.grad_reduce_overlap_world import record_early_reductions
from tests.support.live_memory import Live, kept_by_autograd
from tests.support.parallel_layouts import destroy_layout, make_example, weighted_nll

SHARES = {
    "more on rank 0": [[[1], [2], [3], [4]], [[5]]],
    "more on rank 1": [[[6]], [[3], [0, 2], [1]]],
    "none on rank 0": [[[]], [[0, 1, 2], [4]]],
    "none on rank 1": [[[1], [3]], [[]]],
}
"""Numbers of the example's sequences, by rank and micro-batch."""
NUM_TOKENS = 512
"""Number of tokens of each rank for which memory is measured."""
LAYOUTS = {
    "whole": ParallelSettings(),
    "divided": ParallelSettings(ep=2),
    "overlapped": ParallelSettings(ep=2, overlap_grad_reduce=True),
}


def run_updates(model: Path, parallel: ParallelSettings) -> dict[str, object]:
    """Compute logprobs and run an update with each of the shares.

    A large eps keeps Adam from dividing small gradients by themselves.
    """
    layout, (renderer, contexts) = build_layout(parallel, seed=0), make_example(model)
    policy = Policy(
        ModelSettings(path=str(model)), layout,
        training=TrainingSettings(parallel=parallel, optim=OptimSettings(lr=0.02, eps=5e-3, clip_grad=1e9), num_steps=len(SHARES)),
        special_tokens=renderer.special_tokens,
    )  # fmt: skip
    found: dict[str, list] = {"logprobs": [], "metrics": [], "early": [], "sent": find_sent_changes(policy, HfTensors(model))}
    for step, ranks in enumerate(SHARES.values()):
        batches = policy.pack_local([[[contexts[number] for number in part] for part in mine] for mine in ranks])
        found["logprobs"].append(all_gather_object([logprob_T.cpu() for logprob_T in policy.logprobs(batches)]))
        early: list[int] = []
        if parallel.overlap_grad_reduce:
            record_early_reductions(policy, early)
        found["metrics"].append(policy.update(batches, weighted_nll, step=step))
        found["early"].append(all_gather_object(len(early)))
    weights = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    shapes = [tuple(p.shape) for name, p in policy.network.chunks.named_parameters() if name.endswith("experts.linear_fc2")]
    buckets = sum(len(buffer.buckets) for chunk in policy.network.model for buffer in optimizer.grad_buffers(chunk))
    memory = None if parallel.overlap_grad_reduce else measure_layer(policy)
    destroy_layout(policy)
    return {
        **found, "weights": weights, "shapes": all_gather_object(shapes), "buckets": buckets, "memory": all_gather_object(memory),
    }  # fmt: skip


def find_sent_changes(policy: Policy, stored: HfTensors) -> list:
    """Return the (name, first positions) of tensors that are sent with other bits than they have in the
    model folder: on both ranks, before and after the last rank's last expert has one flipped bit.
    """
    found = []
    (weight,) = (p for name, p in policy.network.chunks.named_parameters() if name.endswith("layers.2.mlp.experts.linear_fc2"))
    for _ in range(2):
        bits = ((name, tensor.view(torch.int32) != stored.read(name).view(torch.int32)) for name, tensor in policy.hf_weights())
        found.append(all_gather_object([(name, differs.nonzero()[:3].tolist()) for name, differs in bits if differs.any()]))
        if dist.get_rank() == dist.get_world_size() - 1:
            weight.data[-1, -1, -1].view(torch.int32).bitwise_xor_(1)
    return found


def measure_layer(policy: Policy) -> tuple[int, int]:
    """Return the bytes that autograd saves in a layer with experts, and the peak of a forward and a
    backward pass.
    """
    (chunk,), generator = policy.network.model, torch.Generator().manual_seed(dist.get_rank())
    experts = policy.network.chunks[0].language.decoder.layers[0].mlp
    set_num_rows(experts, NUM_TOKENS)
    hidden = torch.randn(NUM_TOKENS, 1, policy.spec.hidden_size, generator=generator).requires_grad_()
    saved = kept_by_autograd(experts, lambda: experts(hidden)[0])
    live = Live([hidden, *chunk.parameters(), *(buffer.grad_data for buffer in optimizer.grad_buffers(chunk))])
    with megatron_on_cpu(), live:
        experts(hidden)[0].sum().backward()
    return saved, live.peak


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    connect(read_world(), timeout_s=60)
    whole, results = optimizer.DistributedDataParallelConfig, {}
    for name, parallel in LAYOUTS.items():
        optimizer.DistributedDataParallelConfig = partial(whole, bucket_size=20_000) if parallel.overlap_grad_reduce else whole
        results[name] = run_updates(model, parallel)
    if dist.get_rank() == 0:
        torch.save(results, out)


if __name__ == "__main__":
    main()
