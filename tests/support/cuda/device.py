"""Loads the emulated CUDA device into this process, and answers the functions of torch.cuda that
the CPU build of torch lacks.

Call `load` before torch is imported, because torch looks for its CUDA hooks only once. Then
torch.cuda.is_available() is True, and tensors on "cuda" compute with the CPU kernels in host memory
(device.cpp). The emulated GPU is an H200. There is one stream: copies and kernels have ended when
their call returns. torch.compile is disabled, so compiled functions run as written.
"""

import ctypes
import os
import re
import sys
import traceback
from collections import Counter
from pathlib import Path

from tests.support.cuda.build import build_library, torch_folder

NUM_DEVICES = 8
OUR_CODE = re.compile(r"/megatron_rl/(?!compat/)|/megatron/core/|/tests/(?!support/cuda/)")
"""Files that appear in the name of a wait."""
NUM_FRAMES = 3
"""Number of stack frames in the name of a wait."""

waits: Counter[str] = Counter()
"""Waits of the host for the device, by operation and calling place, such as
`item < network.py:241 < network.py:199`. """


class Library:
    """C functions of device.cpp."""

    def __init__(self) -> None:
        for name in ("libgomp.so.1", "libc10.so", "libtorch_cpu.so"):
            path = torch_folder() / "lib" / name
            if path.exists():
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(build_library()))
        self.live_bytes, self.peak_bytes = loaded.emulated_live_bytes, loaded.emulated_peak_bytes
        self.reset_peak = loaded.emulated_reset_peak
        self.live_bytes.restype = self.peak_bytes.restype = ctypes.c_int64
        self.current_device, self.set_device = loaded.emulated_current_device, loaded.emulated_set_device
        self.set_device_count = loaded.emulated_set_device_count
        self.pin, self.unpin, self.resize_storage = loaded.emulated_pin, loaded.emulated_unpin, loaded.emulated_resize_storage
        self.pin.argtypes, self.unpin.argtypes = (ctypes.c_size_t, ctypes.c_size_t), (ctypes.c_size_t,)
        self.use_pool, self.pool_bytes = loaded.emulated_use_pool, loaded.emulated_pool_bytes
        self.sleep_pool, self.wake_pool = loaded.emulated_sleep_pool, loaded.emulated_wake_pool
        self.pool_bytes.restype, self.sleep_pool.argtypes = ctypes.c_int64, (ctypes.c_int, ctypes.c_bool)
        self.resize_storage.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        self.on_wait = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(record_wait)  # kept, because the library holds its address
        loaded.emulated_set_on_wait(self.on_wait)


def record_wait(operation: bytes) -> None:
    frames = [f for f in traceback.extract_stack() if OUR_CODE.search(f.filename)]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-NUM_FRAMES:])]
    waits[" < ".join([operation.decode(), *places])] += 1


def load() -> None:
    """Load the library, import torch and replace the functions of torch.cuda."""
    assert "torch" not in sys.modules, "load the emulated device before torch is imported"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # there is no Triton
    library = Library()
    library.set_device_count(NUM_DEVICES)
    import torch
    import torch._dynamo  # this import queries the real CUDA build, if torch.cuda.is_available()

    from tests.support.cuda import torch_cuda

    torch_cuda.install(library)
    torch._C._cuda_getCurrentRawStream = lambda *_: 0
    torch._C._host_emptyCache = lambda *_: None
    _replace_storage_resize(library)


def _replace_storage_resize(library: Library) -> None:
    import torch

    resize_on_host = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize_on_host(storage, size)
        library.resize_storage(storage._cdata, size)
        return storage

    torch.UntypedStorage.resize_ = resize
