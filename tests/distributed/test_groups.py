"""Process groups of vLLM and Megatron for 32 ranks, in a fake world whose other members do not
exist, so no GPU and no second process is needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state as engines
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.platforms import current_platform

from megatron_rl.config import EngineSettings, ParallelSettings
from megatron_rl.memory_plan.rank_shares import fake_process_group
from megatron_rl.policy.parallel import build_layout
from megatron_rl.rollout.vllm.engine_core import device_arguments

SIZE = 32
MOST = 700
"""Upper bound on groups created per rank. Creating a group is a barrier at a store (10 to 30 ms
over a network), and all groups are created before a run starts.
"""


@dataclass
class Seen:
    """Members of one rank's groups, and the number of groups created."""

    engine: list[int]
    tp: list[int]
    pp: list[int]
    dp: list[int]
    ep: list[int]
    tp_ep: list[int]
    expert_dp: list[int]
    num_made: int


@contextmanager
def engine_groups(tp: int) -> Iterator[None]:
    """Create vLLM's groups as its worker does with the external launcher (v1/worker/gpu_worker.py,
    init_worker_distributed_environment).
    """
    given = device_arguments(EngineSettings(tp=tp), cuda=True)
    parallel = ParallelConfig(tensor_parallel_size=tp, distributed_executor_backend=given["distributed_executor_backend"])
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        engines.init_distributed_environment(world_size=SIZE, rank=dist.get_rank(), local_rank=dist.get_rank() % 8, backend="fake")
        engines.initialize_model_parallel(tp, backend="fake")
        try:
            yield
        finally:
            engines.destroy_model_parallel()
            engines._WORLD, engines._NODE_COUNT = None, None


def same_node(group: dist.ProcessGroup, source: int) -> list[bool]:
    """Return, for each rank of a group, whether it is on the same node as the rank at index
    `source`. Nodes have eight ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    return [rank // 8 == ranks[source] // 8 for rank in ranks]


def seen_by(rank: int, *, parallel: ParallelSettings, engine_tp: int, monkeypatch: pytest.MonkeyPatch) -> Seen:
    made, new_group = [], dist.new_group

    def counted(*args: object, **kwargs: object) -> object:
        kwargs |= {"backend": "fake"}  # gloo would need peers
        made.append(args)
        return new_group(*args, **kwargs)

    # With the fake backend, vLLM's queries to its peers would return uninitialized memory.
    monkeypatch.setattr(engines, "in_the_same_node_as", lambda group, source_rank=0: same_node(group, source_rank))
    monkeypatch.setattr(MessageQueue, "create_from_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda self: False)
    monkeypatch.setattr(type(current_platform), "dist_backend", "fake")
    monkeypatch.setattr(dist, "new_group", counted)
    with fake_process_group(rank, size=SIZE):
        layout = build_layout(parallel, seed=0)
        with engine_groups(engine_tp):
            return Seen(
                engine=engines.get_tp_group().ranks, tp=dist.get_process_group_ranks(layout.tp_group),
                pp=dist.get_process_group_ranks(layout.pp_group),
                dp=dist.get_process_group_ranks(parallel_state.get_data_parallel_group()),
                ep=dist.get_process_group_ranks(layout.ep_group), tp_ep=dist.get_process_group_ranks(layout.tp_ep_group),
                expert_dp=dist.get_process_group_ranks(parallel_state.get_expert_data_parallel_group()), num_made=len(made),
            )  # fmt: skip


@pytest.mark.parametrize(("tp", "pp", "ep", "engine_tp"), [(2, 1, 1, 1), (2, 2, 4, 2), (4, 1, 1, 1)])
def test_every_rank_has_its_engine_and_its_neighbors(tp: int, pp: int, ep: int, engine_tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and tensor-parallel groups are consecutive ranks, and a tensor-parallel group lies
    within one node of eight. Data-parallel ranks are tp apart, and pipeline stages are one pp-th of
    the world apart. Expert-parallel ranks are adjacent data-parallel ranks, and ranks with the same
    experts are tp * ep apart.
    """
    parallel = ParallelSettings(tp=tp, pp=pp, ep=ep, sequence_parallel=tp > 1)
    for rank in range(SIZE):
        seen = seen_by(rank, parallel=parallel, engine_tp=engine_tp, monkeypatch=monkeypatch)
        monkeypatch.undo()
        stage, first = SIZE // pp, rank - rank % tp
        assert seen.engine == list(range(rank - rank % engine_tp, rank - rank % engine_tp + engine_tp))
        assert seen.tp == list(range(first, first + tp)) and len({each // 8 for each in seen.tp}) == 1
        assert seen.dp == list(range(rank // stage * stage + rank % tp, (rank // stage + 1) * stage, tp))
        block = rank - rank % (tp * ep)
        assert seen.tp_ep == list(range(block, block + tp * ep)) and seen.ep == seen.tp_ep[rank % tp :: tp]
        assert seen.expert_dp == list(range(rank // stage * stage + rank % (tp * ep), (rank // stage + 1) * stage, tp * ep))
        assert seen.pp == [rank % stage + index * stage for index in range(pp)]
        assert seen.num_made <= MOST
