"""Counts how often the host waits for the device in one update, on the emulated device."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.algo.value import make_value_objective, shared_value_loss
from megatron_rl.batching.packing import pack
from megatron_rl.config import AlgoSettings, CriticSettings, LoraSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.renderer import Renderer
from tests.support.cuda import device
from tests.support.packed_example import make_example_items

UPDATE_WAITS = {
    "item in finalize_model_grads.py": 1,
    "copy to host in loss_metrics.py": 1,
    "item in network.py": 2,
    "item in clip_grads.py": 1,
}
"""Waits of an update: whether there were tokens, all loss metrics, whether gradients and weights
are finite, and the gradient norm."""


LAYER_WAITS = {
    "copy to host in token_dispatcher.py": 1, "masked_select in moe_utils.py": 1,
    "masked_select in token_dispatcher.py": 1, "copy to device from unpinned memory in experts.py": 1,
}  # fmt: skip
"""Waits in each layer with experts and micro-batch, twice with full recomputation: the numbers of
tokens per expert depend on the routing."""


def count_update_waits(
    model: Path, layout: Layout, parallel: ParallelSettings, *, dtype: str = "bfloat16", rank: int = 0, micro_batches: int = 1
) -> tuple[Counter[str], Policy]:
    """Return the waits of a policy's second update by operation and calling file, and the policy.

    The update has a value head, images, a prompt that two sequences share, and more rows than one
    block of logits. The first update also allocates the moments, so it is not counted.
    """
    settings = ModelSettings(path=str(model), dtype=dtype)
    renderer = Renderer(settings)
    batch = pack(
        make_example_items(renderer)[2:5], image_token_id=renderer.image_token_id, positions=read_spec(model).rope_positions,
        multiple_of=layout.tp, share_prompts=True, device=torch.device("cuda", torch.cuda.current_device()),
    )  # fmt: skip
    batch = replace(batch, old_value_T=batch.weight_T, return_T=batch.weight_T)
    policy = Policy(
        settings, layout,
        training=TrainingSettings(parallel=parallel, optim=OptimSettings(), num_steps=2, lora=LoraSettings(rank=rank)),
        special_tokens=renderer.special_tokens, critic=CriticSettings(normalize_returns=True),
    )  # fmt: skip
    loss = shared_value_loss(
        make_policy_objective(AlgoSettings(clip_ratio_c=3.0)), make_value_objective(CriticSettings(), level="turns"), 0.5
    )
    policy.update([batch] * micro_batches, loss, step=0)
    device.waits.clear()
    policy.update([batch] * micro_batches, loss, step=1)
    return count_by_file(device.waits), policy


def count_by_file(waits: Mapping[str, int]) -> Counter[str]:
    """Return the number of waits by operation and calling file."""
    counted: Counter[str] = Counter()
    for place, count in waits.items():
        operation, *frames = place.split(" < ")
        counted[f"{operation} in {frames[0].split(':')[0] if frames else 'torch'}"] += count
    return counted
