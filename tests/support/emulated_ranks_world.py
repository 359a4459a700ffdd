"""Runs parallel layouts on emulated devices, one for each rank, and two further checks. Run by
tests/cuda/test_emulated_device.py, on two ranks of tests.support.cuda.

    emulated_ranks_world.py MODELS OUT LAYOUT ...

Writes the result of each layout (see parallel_layouts.py), and world.json with

- waits: the waits of the host in an update with tp 2 and sequence parallelism, and what is expected;
- collectives: the number of collectives and messages on device tensors by name in two such updates;
- mistakes: the error of each planted collective on this rank, by mistake.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config import ParallelSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.policy.parallel import build_layout
from tests.support.cuda import process_group
from tests.support.parallel_layouts import destroy_layout, run_layout
from tests.support.update_waits import UPDATE_WAITS, count_update_waits


def reduce_on_rank_zero_only() -> None:
    """Leave out a collective on rank 1, which goes on with the next one."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4, device="cuda"))
    dist.broadcast(torch.ones(4, device="cuda"), src=0)


def reduce_different_sizes() -> None:
    dist.all_reduce(torch.ones(4 + dist.get_rank(), device="cuda"))


def broadcast_from_itself() -> None:
    dist.broadcast(torch.ones(4, device="cuda"), src=dist.get_rank())


def reduce_a_transposed_tensor() -> None:
    dist.all_reduce(torch.ones(4, 2, device="cuda").t())


def reduce_on_another_device() -> None:
    """Use the device of the other rank."""
    dist.all_reduce(torch.ones(4, device=f"cuda:{1 - dist.get_rank()}"))


MISTAKES: tuple[Callable[[], None], ...] = (
    reduce_on_rank_zero_only, reduce_different_sizes, broadcast_from_itself, reduce_a_transposed_tensor, reduce_on_another_device,
)  # fmt: skip


def run_mistakes() -> dict[str, list[str]]:
    """Return the errors on all ranks by mistake, "" where there is none."""
    found: dict[str, list[str]] = {}
    for mistake in MISTAKES:
        error = ""
        try:
            mistake()
        except RuntimeError as raised:
            error = str(raised)
        errors = [""] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        found[mistake.__name__] = errors
    return found


def main() -> None:
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    connect(read_world(), timeout_s=240)
    for layout in sys.argv[3:]:
        run_layout(models, out, layout)
    parallel = ParallelSettings(tp=2, sequence_parallel=True, recompute="full", log_probs_chunk_size=4)
    process_group.collectives.clear()
    waits, policy = count_update_waits(models / "untied", build_layout(parallel, seed=0), parallel, rank=4)
    collectives = Counter(call.split(" [")[0] for call in process_group.collectives)
    destroy_layout(policy)
    mistakes = run_mistakes()
    if dist.get_rank() == 0:
        (out / "world.json").write_text(
            json.dumps({"waits": waits, "expected_waits": UPDATE_WAITS, "collectives": collectives, "mistakes": mistakes}, indent=1)
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
