"""GPUs that a run can be planned for, with specifications from NVIDIA's data sheets."""

from dataclasses import dataclass

GB = 10**9
GPUS_PER_NODE = 8
USABLE_FRACTION = 0.9
"""Usable fraction of a GPU's memory; the rest is reserved for fragmentation."""


@dataclass(slots=True, frozen=True, kw_only=True)
class GpuSpec:
    """Data-sheet specifications of a GPU."""

    memory_bytes: int
    """Nominal memory in bytes; devices report up to 7% more (an H200: 150.7e9)."""
    flops_per_s: float
    """Dense bfloat16 FLOP/s."""
    hbm_bytes_per_s: float
    """Bandwidth of the GPU's own memory in bytes/s."""
    link_bytes_per_s: float
    """Bandwidth to the other GPUs of a node, in bytes/s per direction.

    With NVLink, this is half of NVLink's nominal bandwidth; without NVLink, it is the bandwidth of
    PCIe.
    """
    pcie_bytes_per_s: float
    """PCIe x16 bandwidth to host memory, in bytes/s per direction."""


GPU_SPECS = {
    "l4": GpuSpec(memory_bytes=24 * GB, flops_per_s=121e12, hbm_bytes_per_s=300e9, link_bytes_per_s=32e9, pcie_bytes_per_s=32e9),
    "l40s": GpuSpec(memory_bytes=48 * GB, flops_per_s=362e12, hbm_bytes_per_s=864e9, link_bytes_per_s=32e9, pcie_bytes_per_s=32e9),
    "a100": GpuSpec(memory_bytes=80 * GB, flops_per_s=312e12, hbm_bytes_per_s=2039e9, link_bytes_per_s=300e9, pcie_bytes_per_s=32e9),
    "h100": GpuSpec(memory_bytes=80 * GB, flops_per_s=989e12, hbm_bytes_per_s=3350e9, link_bytes_per_s=450e9, pcie_bytes_per_s=64e9),
    "h200": GpuSpec(memory_bytes=141 * GB, flops_per_s=989e12, hbm_bytes_per_s=4800e9, link_bytes_per_s=450e9, pcie_bytes_per_s=64e9),
}
"""Specifications by GPU name, for the SXM variant if a GPU has several variants.

The data sheets are those of L4 (2023), L40S (2023), A100 80GB (2021), H100 (2022) and H200 (2024).
The specifications were not measured.
"""


def closest_gpu_name(memory_bytes: int, *, preferred: str) -> str:
    """Return the name of the known GPU that best matches a GPU with this much memory.

    The result is the GPU with the most memory among the known GPUs that have at most `memory_bytes`
    of memory. If several GPUs are tied and `preferred` is one of them, the result is `preferred`.
    If all known GPUs have more memory, the result is "l4".
    """
    fitting = [name for name, gpu in GPU_SPECS.items() if gpu.memory_bytes <= memory_bytes]
    return max(fitting, key=lambda name: (GPU_SPECS[name].memory_bytes, name == preferred), default="l4")


def format_gb(size: float) -> str:
    """Format a number of bytes as text in GB."""
    return f"{size / GB:.1f} GB"
