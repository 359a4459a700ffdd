"""Process groups that communicate in an update.

On a GPU each of them creates an NCCL communicator.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.config import AlgoSettings, OptimSettings
from tests.support.packed_example import make_example_items
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world


def test_an_update_uses_three_groups_of_one_rank(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of one rank uses three process groups, as counted in memory_plan/gpu_memory.py.

    The world's group is used for host tensors only.
    """
    used: set[str] = set()

    def record(name: str) -> None:
        collective = getattr(dist, name)

        def call(tensor: torch.Tensor, *given: object, group: dist.ProcessGroup | None = None, **named: object) -> object:
            if group is not None and group is not dist.group.WORLD:
                used.add(group.group_desc)
            return collective(tensor, *given, group=group, **named)

        for module in list(sys.modules.values()):
            if vars(module).get(name) is collective:
                monkeypatch.setattr(module, name, call)

    with single_process_world():
        policy, renderer = make_policy_and_renderer(random_model, OptimSettings())
        batches = policy.pack(make_example_items(renderer), max_tokens=200)
        for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast"):
            record(name)
        policy.update(batches, make_policy_objective(AlgoSettings()), step=0)
    assert len(used) == 3, used
