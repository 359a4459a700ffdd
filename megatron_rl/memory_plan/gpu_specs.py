"""The GPUs that a run can be planned for, as NVIDIA's data sheets describe them; nothing here was measured."""

from dataclasses import dataclass

GB = 10**9
GPUS_PER_NODE = 8
USABLE_FRACTION = 0.9
"""Of a GPU: the rest is left to fragmentation."""


@dataclass(slots=True, frozen=True, kw_only=True)
class GpuSpec:
    memory_bytes: int
    """Bytes, as they are sold; the devices report up to 7% more (an H200: 150.7e9)."""
    flops_per_s: float
    """Dense bfloat16 a second."""
    hbm_bytes_per_s: float
    """Bytes a second of its own memory."""
    link_bytes_per_s: float
    """Bytes a second to the other GPUs of its node, in one direction: half of what is sold for NVLink; PCIe where there is none."""
    pcie_bytes_per_s: float
    """Bytes a second to main memory, in one direction: PCIe of 16 lanes."""


GPU_SPECS = {
    "l4": GpuSpec(memory_bytes=24 * GB, flops_per_s=121e12, hbm_bytes_per_s=300e9, link_bytes_per_s=32e9, pcie_bytes_per_s=32e9),
    "l40s": GpuSpec(memory_bytes=48 * GB, flops_per_s=362e12, hbm_bytes_per_s=864e9, link_bytes_per_s=32e9, pcie_bytes_per_s=32e9),
    "a100": GpuSpec(memory_bytes=80 * GB, flops_per_s=312e12, hbm_bytes_per_s=2039e9, link_bytes_per_s=300e9, pcie_bytes_per_s=32e9),
    "h100": GpuSpec(memory_bytes=80 * GB, flops_per_s=989e12, hbm_bytes_per_s=3350e9, link_bytes_per_s=450e9, pcie_bytes_per_s=64e9),
    "h200": GpuSpec(memory_bytes=141 * GB, flops_per_s=989e12, hbm_bytes_per_s=4800e9, link_bytes_per_s=450e9, pcie_bytes_per_s=64e9),
}
"""The SXM kind where there are several. Data sheets: L4 (2023), L40S (2023), A100 80GB (2021), H100 (2022), H200 (2024)."""


def closest_gpu_name(memory_bytes: int, *, preferred: str) -> str:
    """The kind whose row fits a GPU of so many bytes: the largest that is no larger, and of equal ones the one that is named."""
    fitting = [name for name, gpu in GPU_SPECS.items() if gpu.memory_bytes <= memory_bytes]
    return max(fitting, key=lambda name: (GPU_SPECS[name].memory_bytes, name == preferred), default="l4")


def format_gb(size: float) -> str:
    return f"{size / GB:.1f} GB"
