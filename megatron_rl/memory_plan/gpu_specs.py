"""GPUs that a run can be planned for, as specified by NVIDIA's data sheets, not measured."""

from dataclasses import dataclass

GB = 10**9
GPUS_PER_NODE = 8
USABLE_FRACTION = 0.9
"""Usable fraction of a GPU's memory. The rest allows for fragmentation."""


@dataclass(slots=True, frozen=True, kw_only=True)
class GpuSpec:
    """Data-sheet specifications of a GPU."""

    memory_bytes: int
    """Nominal memory in bytes. Devices report up to 7% more (an H200: 150.7e9)."""
    flops_per_s: float
    """Dense bfloat16 FLOP/s."""
    hbm_bytes_per_s: float
    """Bandwidth of the GPU's memory in bytes per second."""
    link_bytes_per_s: float
    """Bandwidth to the other GPUs of a node in bytes per second and direction.

    It is half of the nominal figure for NVLink, or that of PCIe without NVLink.
    """
    pcie_bytes_per_s: float
    """Bandwidth to main memory in bytes per second and direction, of PCIe with 16 lanes."""


GPU_SPECS = {
    "l4": GpuSpec(memory_bytes=24 * GB, flops_per_s=121e12, hbm_bytes_per_s=300e9, link_bytes_per_s=32e9, pcie_bytes_per_s=32e9),
    "l40s": GpuSpec(memory_bytes=48 * GB, flops_per_s=362e12, hbm_bytes_per_s=864e9, link_bytes_per_s=32e9, pcie_bytes_per_s=32e9),
    "a100": GpuSpec(memory_bytes=80 * GB, flops_per_s=312e12, hbm_bytes_per_s=2039e9, link_bytes_per_s=300e9, pcie_bytes_per_s=32e9),
    "h100": GpuSpec(memory_bytes=80 * GB, flops_per_s=989e12, hbm_bytes_per_s=3350e9, link_bytes_per_s=450e9, pcie_bytes_per_s=64e9),
    "h200": GpuSpec(memory_bytes=141 * GB, flops_per_s=989e12, hbm_bytes_per_s=4800e9, link_bytes_per_s=450e9, pcie_bytes_per_s=64e9),
}
"""Specifications by GPU name, of the SXM variant if there are several.

Data sheets: L4 (2023), L40S (2023), A100 80GB (2021), H100 (2022), H200 (2024).
"""


def closest_gpu_name(memory_bytes: int, *, preferred: str) -> str:
    """Return the name of the GPU that is closest to one with this memory.

    It is the largest that is not larger; of equal ones `preferred` is taken.
    """
    fitting = [name for name, gpu in GPU_SPECS.items() if gpu.memory_bytes <= memory_bytes]
    return max(fitting, key=lambda name: (GPU_SPECS[name].memory_bytes, name == preferred), default="l4")


def format_gb(size: float) -> str:
    """Return a number of bytes as text in GB."""
    return f"{size / GB:.1f} GB"
