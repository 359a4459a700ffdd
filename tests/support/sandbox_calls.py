"""Prints, as JSON, the results of calls in an unprivileged sandbox pool, each of which hits another
isolation layer. Run by test_sandbox_cli.py.
"""

import asyncio
import json
import time

from PIL import Image

from megatron_rl_sandbox import BoxLimits, SandboxPool

CALLS = {
    "layers": "",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', 1))",
    "files": "open('/etc/passwd').read()",
    "write": "open('/usr/x', 'w')",
    "input": "open('image_0.png', 'wb')",
    "replace": "import os\nos.rename('image_0.png', 'x.png')",
    "image": "image_0.show()",
    "namespace": "import ctypes\nctypes.CDLL(None, use_errno=True).unshare(0x10000000)",
    "shared": "import mmap\nmmap.mmap(-1, 1 << 20)",
    "memory": "import os, time\nfor k in range(4):\n  if os.fork() == 0: x = b'x' * (90 << 20); time.sleep(9)\ntime.sleep(9)",
    "processes": "import os, time\nfor k in range(40):\n  if os.fork() == 0: time.sleep(9)\nprint('forked')",
    "time": "while True: pass",
    "after": "import os; print(os.getpid(), os.getuid())",
}


async def main() -> None:
    limits = BoxLimits(memory=200 << 20, processes=10, call_timeout_s=5)
    seen: dict[str, object] = {}
    async with SandboxPool(size=1, limits=limits) as pool, await pool.open(images={"image_0": Image.new("RGB", (50, 40))}) as box:
        for name, code in CALLS.items():
            result = await box.run(code, timeout_s=1 if name == "time" else None)
            error = result.error.type if result.error else None
            seen[name] = [result.fault.value, error, result.limit, result.text, len(result.images)]
        seen["layers"] = pool.layers.enabled_names()
        async with asyncio.timeout(5):
            began = time.monotonic()
            await box.close()
            seen["closed_s"] = time.monotonic() - began
    print(json.dumps(seen))


asyncio.run(main())
