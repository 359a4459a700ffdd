"""Runs untrusted Python code in many concurrent boxes, with images as inputs and outputs.

The package does not depend on torch. README.md describes the threat model.

Example:
    async with SandboxPool(size=8) as pool:
        async with await pool.open(images={"image_0": image}) as box:
            result = await box.run("image_0.crop((0, 0, 64, 64)).show()")
"""

from megatron_rl_sandbox.box import Box
from megatron_rl_sandbox.layers import Layers
from megatron_rl_sandbox.pool import SandboxPool
from megatron_rl_sandbox.records import (
    BoxClosed,
    BoxLimits,
    CallError,
    CallResult,
    CallUsage,
    DroppedOutput,
    Fault,
    Isolation,
    PoolFull,
    ReturnedImage,
    SandboxAccessDenied,
    SandboxError,
)

__all__ = [
    "Box",
    "BoxClosed",
    "BoxLimits",
    "CallError",
    "CallResult",
    "CallUsage",
    "DroppedOutput",
    "Fault",
    "Isolation",
    "Layers",
    "PoolFull",
    "ReturnedImage",
    "SandboxAccessDenied",
    "SandboxError",
    "SandboxPool",
]  # fmt: skip
