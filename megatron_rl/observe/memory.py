"""How much memory the processes of a run have taken, at most."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

GB = 1e9
PROC_STATUS_FILE = Path("/proc/self/status")


def peak_memory() -> dict[str, float]:
    """Of this process, by metric. The host's: what was resident since it began (VmHWM; ru_maxrss would remember the process that it was
    forked from). The device's: what torch's allocator held since the last call; an engine that sleeps holds its memory elsewhere."""
    (kibibytes,) = re.findall(r"^VmHWM:\s*(\d+) kB$", PROC_STATUS_FILE.read_text(), flags=re.MULTILINE)
    found = {"memory/host_gb": int(kibibytes) * 1024 / GB}
    if torch.cuda.is_initialized():
        found["memory/device_gb"] = torch.cuda.max_memory_reserved() / GB
        torch.cuda.reset_peak_memory_stats()
    return found


def max_over_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of all ranks' peaks."""
    return {name: max(each[name] for each in ranks) for name in ranks[0]}
