"""Trains with bfloat16 parameters, and offloads a policy between steps. Run under torchrun by
test_precision.py on one process.

    precision.py MODEL OUT
"""

import sys
from pathlib import Path

import torch

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.batching.packing import pack
from megatron_rl.config import AlgoSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import Layout, build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.renderer import Renderer
from tests.support.packed_example import make_example_items
from tests.support.parallel_layouts import full_logits


def make_policy(model: Path, layout: Layout, *, dtype: str, lr: float, **parallel: object) -> Policy:
    renderer = Renderer(ModelSettings(path=str(model)))
    return Policy(
        ModelSettings(path=str(model), dtype=dtype), layout,
        training=TrainingSettings(parallel=ParallelSettings(**parallel), optim=OptimSettings(lr=lr), num_steps=9),
        special_tokens=renderer.special_tokens,
    )  # fmt: skip


def copy_main_weights(policy: Policy) -> torch.Tensor:
    """Return the optimizer's main weights as a flat tensor."""
    return torch.cat([p.detach().flatten() for group in policy.network.optimizer.param_groups for p in group["params"]])


def run_update(policy: Policy, renderer: Renderer) -> dict[str, float]:
    return policy.update(policy.pack(make_example_items(renderer), max_tokens=200), make_policy_objective(AlgoSettings()), step=0)


def copy_weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.hf_weights()}


def train_in_bfloat16(model: Path, layout: Layout, renderer: Renderer) -> dict[str, object]:
    """Train with steps of 1e-5, which are far below the spacing of most bfloat16 weights, so that
    they accumulate only in the fp32 main weights.
    """
    policy = make_policy(model, layout, dtype="bfloat16", lr=1e-5)
    whole = pack(make_example_items(renderer), image_token_id=renderer.image_token_id, positions=policy.spec.rope_positions)
    result: dict[str, object] = {"logits": full_logits(policy, whole), "before": copy_weights(policy)}
    result["main_before"] = copy_main_weights(policy).clone()
    run_update(policy, renderer)
    result["main_after_1"], result["after_1"] = copy_main_weights(policy).clone(), copy_weights(policy)
    for _ in range(7):
        run_update(policy, renderer)
    result["main_after_8"], result["after_8"] = copy_main_weights(policy).clone(), copy_weights(policy)
    result["main_grad_dtypes"] = {str(p.main_grad.dtype) for p in policy.network.chunks.parameters()}
    groups = policy.network.optimizer.chained_optimizers[0].model_float16_groups
    result["order"] = torch.cat([p.detach().float().flatten() for group in groups for p in group])
    return result


def offload_and_restore(model: Path, layout: Layout, renderer: Renderer) -> dict[str, object]:
    stays = make_policy(model, layout, dtype="float32", lr=1e-2)
    leaves = make_policy(model, layout, dtype="float32", lr=1e-2, offload_params=True)
    held = []
    for _ in range(2):
        run_update(stays, renderer)
        run_update(leaves, renderer)
        leaves.sleep()
        held.append(sum(s.nbytes() for s in {p.untyped_storage() for p in leaves.network.chunks.parameters()}))
        held.append(sum(p.main_grad.untyped_storage().nbytes() for p in leaves.network.chunks.parameters()))
        leaves.wake()
    return {"stays": copy_weights(stays), "leaves": copy_weights(leaves), "held": held}


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    connect(read_world(), timeout_s=120)
    layout = build_layout(ParallelSettings(), seed=0)
    renderer = Renderer(ModelSettings(path=str(model)))
    torch.save(train_in_bfloat16(model, layout, renderer), out / "bfloat16.pt")
    torch.save(offload_and_restore(model, layout, renderer), out / "offload.pt")


if __name__ == "__main__":
    main()
