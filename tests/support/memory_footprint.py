"""Measures the memory of a policy after a training step: the size of its storages by kind, each
counted once.
"""

import torch

from megatron_rl.memory_plan.rank_shares import MemoryFootprint
from megatron_rl.policy.network import Network
from megatron_rl.policy.optimizer_state import own_optimizers


def measure_footprint(network: Network) -> MemoryFootprint:
    trained = [p for p in network.chunks.parameters() if p.requires_grad]
    state = {p: entry for part in own_optimizers(network.optimizer) for p, entry in part.optimizer.state.items()}
    parameters, main = _storages(network.chunks.parameters()), {p.untyped_storage().data_ptr(): p.nbytes for p in state}
    return MemoryFootprint(
        param_bytes=sum(parameters.values()),
        grad_bytes=sum(_storages(p.main_grad for p in trained).values()),
        main_weight_bytes=sum(size for place, size in main.items() if place not in parameters),
        moment_bytes=sum(sum(_storages([entry["exp_avg"], entry["exp_avg_sq"]]).values()) for entry in state.values()),
    )


def _storages(tensors) -> dict[int, int]:  # noqa: ANN001
    storages: list[torch.UntypedStorage] = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
