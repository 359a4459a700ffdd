"""Runs three optimizer steps in one parallel layout. Run under torchrun by test_steps.py.

    optimizer_steps_world.py MODELS OUT LAYOUT

LAYOUT is written as in parallel_layouts.py.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config import ModelSettings, OptimSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from tests.support.hf_reference import TEMPERATURE
from tests.support.parallel_layouts import LayoutCase, destroy_layout, make_example, weighted_nll

OPTIM = OptimSettings(lr=0.2, eps=5e-3, weight_decay=0.1, clip_grad=5.0, beta2=0.99)
"""A large eps keeps Adam from dividing small gradients by themselves, so that steps can be
compared."""


def main() -> None:
    models, out, case = Path(sys.argv[1]), Path(sys.argv[2]), LayoutCase.parse(sys.argv[3])
    connect(read_world(), timeout_s=240)
    layout, (renderer, contexts) = build_layout(case.parallel_settings(), seed=0), make_example(models / case.model)
    policy = Policy(
        ModelSettings(path=str(models / case.model)), layout,
        training=TrainingSettings(parallel=case.parallel_settings(), optim=OPTIM, num_steps=3),
        special_tokens=renderer.special_tokens, temperature=TEMPERATURE,
    )  # fmt: skip
    before = {name: tensor.clone().double() for name, tensor in policy.hf_weights()}
    metrics = [policy.update(policy.pack(contexts, max_tokens=400), weighted_nll, step=step) for step in range(3)]
    change = {name: tensor.double() - before[name] for name, tensor in policy.hf_weights()}
    if dist.get_rank() == 0:
        torch.save({"loss": [m["loss"] for m in metrics], "grad_norm": [m["grad_norm"] for m in metrics], "change": change}, out)
    destroy_layout(policy)


if __name__ == "__main__":
    main()
