"""The GPUs that a run can be planned for, as NVIDIA's data sheets describe them; nothing here was measured."""

from dataclasses import dataclass

GB = 10**9
GPUS_A_NODE = 8
USABLE = 0.9
"""Of a GPU: the rest is left to fragmentation."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Gpu:
    memory: int
    """Bytes, as they are sold; the devices report up to 7% more (an H200: 150.7e9)."""
    flops: float
    """Dense bfloat16 a second."""
    hbm: float
    """Bytes a second of its own memory."""
    link: float
    """Bytes a second to the other GPUs of its node, in one direction: half of what is sold for NVLink; PCIe where there is none."""
    host: float
    """Bytes a second to main memory, in one direction: PCIe of 16 lanes."""


GPUS = {
    "l4": Gpu(memory=24 * GB, flops=121e12, hbm=300e9, link=32e9, host=32e9),
    "l40s": Gpu(memory=48 * GB, flops=362e12, hbm=864e9, link=32e9, host=32e9),
    "a100": Gpu(memory=80 * GB, flops=312e12, hbm=2039e9, link=300e9, host=32e9),
    "h100": Gpu(memory=80 * GB, flops=989e12, hbm=3350e9, link=450e9, host=64e9),
    "h200": Gpu(memory=141 * GB, flops=989e12, hbm=4800e9, link=450e9, host=64e9),
}
"""The SXM kind where there are several. Data sheets: L4 (2023), L40S (2023), A100 80GB (2021), H100 (2022), H200 (2024)."""


def at_hand(memory: int, *, named: str) -> str:
    """The kind whose row fits a GPU of so many bytes: the largest that is no larger, and of equal ones the one that is named."""
    fitting = [name for name, gpu in GPUS.items() if gpu.memory <= memory]
    return max(fitting, key=lambda name: (GPUS[name].memory, name == named), default="l4")


def in_gb(size: float) -> str:
    return f"{size / GB:.1f} GB"
