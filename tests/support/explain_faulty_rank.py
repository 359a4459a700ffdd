"""A torchrun script: launch/explain.py with a trainer whose last rank computes incorrectly if the
model is sharded.
"""

import sys

import torch
import torch.distributed as dist

from megatron_rl.cli.explain import main
from megatron_rl.explain import replay_forward
from megatron_rl.explain.trainer_forward import TrainerForward


class CorruptedTrainer(TrainerForward):
    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)
        if self.layout.tp * self.layout.pp > 1 and dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                self.chunks[-1].language.decoder.layers[-1].self_attention.linear_proj.weight.mul_(1.01)


if __name__ == "__main__":
    replay_forward.TrainerForward = CorruptedTrainer
    sys.exit(main(sys.argv[1:]))
