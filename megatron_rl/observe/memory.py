"""Peak memory of a run's processes."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

GB = 1e9
PROC_STATUS_FILE = Path("/proc/self/status")


def peak_memory() -> dict[str, float]:
    """Return the peak memory of this process as metrics.

    The metric memory/host_gb is the peak resident memory since the process started. It is read from
    VmHWM, because ru_maxrss would include the memory of the parent process before the fork. The
    metric memory/device_gb is the peak memory that torch's allocator has reserved since the last
    call. Memory that a sleeping engine keeps outside of this allocator is not included.
    """
    (kibibytes,) = re.findall(r"^VmHWM:\s*(\d+) kB$", PROC_STATUS_FILE.read_text(), flags=re.MULTILINE)
    found = {"memory/host_gb": int(kibibytes) * 1024 / GB}
    if torch.cuda.is_initialized():
        found["memory/device_gb"] = torch.cuda.max_memory_reserved() / GB
        torch.cuda.reset_peak_memory_stats()
    return found


def max_over_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the maximum of each metric over all ranks."""
    return {name: max(each[name] for each in ranks) for name in ranks[0]}
