"""Turns this process into one with emulated GPUs, before torch is imported: as a pytest plugin
(`pytest -p tests.support.cuda.session tests/gpu`), or by an import.
"""

from tests.support.cuda import device

device.load()

from tests.support.cuda import flash_attention, process_group, rms_norm  # noqa: E402 (they import torch)

flash_attention.install()
process_group.install()
rms_norm.install()
