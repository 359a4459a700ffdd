"""One GRPO step with frozen modules or with learning rates per module, at tp 2 x pp 2 or on one
process. Run under torchrun by test_parts.py.

    frozen_parts_world.py MODEL OUT TP PP CASE ...
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.config import AlgoSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import Layout, build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.renderer import Renderer
from tests.support.packed_example import make_example_items

CASES: dict[str, tuple[list[str], dict[str, float]]] = {
    # frozen modules, learning rate per module
    "whole": ([], {}),
    "no_vision": (["vision"], {}),
    "no_merger": (["merger"], {}),
    "no_language": (["language"], {}),
    "language_only": (["vision", "merger"], {}),
    "own_rates": ([], {"vision": 0.025, "merger": 0.0}),
}


def train_one_step(model: Path, layout: Layout, parallel: ParallelSettings, case: str) -> dict[str, object]:
    frozen, part_lr = CASES[case]
    settings = ModelSettings(path=str(model), frozen=frozen)
    renderer = Renderer(settings)
    optim = OptimSettings(lr=0.1, eps=1e-3, clip_grad=1e9, lr_by_module=part_lr)  # no clipping: it would couple the updates of all modules
    policy = Policy(
        settings, layout, training=TrainingSettings(parallel=parallel, optim=optim, num_steps=1), special_tokens=renderer.special_tokens,
    )  # fmt: skip
    before = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    policy.update(policy.pack(make_example_items(renderer), max_tokens=10_000), make_policy_objective(AlgoSettings()), step=0)
    mine = {name: p for name, p in policy.network.chunks.named_parameters() if "main_grad" in p.__dict__}
    state = sum(p.numel() for group in policy.network.optimizer.param_groups for p in group["params"])
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (sorted(mine), sum(p.numel() for p in mine.values()), state))
    return {"change": {name: tensor - before[name] for name, tensor in policy.hf_weights()}, "ranks": everyone}


def main() -> None:
    model, out, tp, pp = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    connect(read_world(), timeout_s=240)
    parallel = ParallelSettings(tp=tp, pp=pp)
    layout = build_layout(parallel, seed=0)
    for case in sys.argv[5:]:
        result = train_one_step(model, layout, parallel, case)
        if dist.get_rank() == 0:
            torch.save(result, out / f"{case}_tp{tp}_pp{pp}.pt")


if __name__ == "__main__":
    main()
