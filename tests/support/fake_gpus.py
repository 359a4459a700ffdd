"""Makes torch report GPUs that this machine does not have, with the values that torch and NVIDIA's
kernel module report for real ones.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.preflight.gpus import Gpu

OPEN_MODULE = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U16)  Sun Jul 27 2025
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""
CLOSED_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_bytes=85_029_158_912)
L40S = Gpu(name="NVIDIA L40S", memory_bytes=47_697_362_944)
L4 = Gpu(name="NVIDIA L4", memory_bytes=23_574_151_168)
MIG_SLICE = Gpu(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", memory_bytes=10_468_982_784)
"""GPUs with the names and total_memory of torch.cuda.get_device_properties, taken from published
logs; none of them was available here.
"""


def patch_gpus(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gpus: Sequence[Gpu], *, driver_text: str = OPEN_MODULE, shared_bytes: int = 8 << 30
) -> None:
    """Replace torch's device queries by those of a CUDA 13 build with these GPUs.

    The driver's version file contains `driver_text`, /dev/shm has `shared_bytes` bytes free, and
    CUDA_VISIBLE_DEVICES is unset.
    """
    (folder / "version").write_text(driver_text)
    monkeypatch.setattr("megatron_rl.preflight.gpus.DRIVER", folder / "version")
    monkeypatch.setattr("megatron_rl.preflight.gpus.shutil.disk_usage", lambda _: SimpleNamespace(free=shared_bytes))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    told = [SimpleNamespace(name=gpu.name, total_memory=gpu.memory_bytes) for gpu in gpus]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told[index])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
