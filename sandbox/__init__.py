"""Runs untrusted Python, many boxes at once, with pictures in and out. No torch; the threat model is README.md.

async with Sandbox(size=8) as pool:
    async with await pool.open(images={"image_0": picture}) as box:
        result = await box.run("image_0.crop((0, 0, 64, 64)).show()")
"""

from sandbox.box import Box
from sandbox.layers import Layers
from sandbox.pool import Sandbox
from sandbox.types import (
    AccessDenied,
    BoxClosed,
    Dropped,
    Error,
    Fault,
    Isolation,
    Limits,
    Picture,
    PoolFull,
    Result,
    SandboxFault,
    Usage,
)

__all__ = [
    "AccessDenied",
    "Box",
    "BoxClosed",
    "Dropped",
    "Error",
    "Fault",
    "Isolation",
    "Layers",
    "Limits",
    "Picture",
    "PoolFull",
    "Result",
    "Sandbox",
    "SandboxFault",
    "Usage",
]  # fmt: skip
