"""The functions and classes of torch.cuda that need C functions of a CUDA build, for the emulated
device. Everything has ended when a call returns, so streams and events have nothing to do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.cuda import _pin_memory_utils

from tests.support.cuda.device import NUM_DEVICES, Library, record_wait

MEMORY_BYTES = 141 * 10**9
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", total_memory=MEMORY_BYTES, major=9, minor=0, multi_processor_count=132, warp_size=32, uuid="0",
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
)  # fmt: skip


class Event:
    """An event that has always happened."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, _: object = None) -> None:
        pass

    wait = record

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        record_wait(b"synchronize event")

    def elapsed_time(self, _: object) -> float:
        return 1.0


class Stream:
    """A stream in which all work has ended."""

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        self.cuda_stream = self.stream_id = 0

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record_event(self, event: object = None) -> object:
        return event or Event()

    def query(self) -> bool:
        return True

    def wait_event(self, _: object) -> None:
        pass

    wait_stream = wait_event

    def synchronize(self) -> None:
        record_wait(b"synchronize stream")


@contextmanager
def _use_stream(_: object) -> Iterator[None]:
    yield


library: Library
"""C functions of the loaded device."""


def install(loaded: Library) -> None:
    """Replace the functions of torch.cuda, of its random states and of page-locked memory."""
    global library
    library = loaded
    generator = torch.default_generator

    def pin(start: int, size: int, flags: int = 0) -> int:
        library.pin(start, size)
        return 0

    def unpin(start: int) -> int:
        library.unpin(start)
        return 0

    answers = {
        **_device_answers(library),
        "get_device_properties": lambda device=None: PROPERTIES, "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "synchronize": lambda device=None: record_wait(b"synchronize device"), "empty_cache": lambda: None, "ipc_collect": lambda: None,
        "Stream": Stream, "Event": Event, "stream": _use_stream, "set_stream": lambda stream: None,
        "current_stream": lambda device=None: Stream(device), "default_stream": lambda device=None: Stream(device),
        "memory_allocated": lambda device=None: library.live_bytes(), "memory_reserved": lambda device=None: library.live_bytes(),
        "max_memory_allocated": lambda device=None: library.peak_bytes(), "max_memory_reserved": lambda device=None: library.peak_bytes(),
        "reset_peak_memory_stats": lambda device=None: library.reset_peak(),
        "mem_get_info": lambda device=None: (MEMORY_BYTES - library.live_bytes(), MEMORY_BYTES),
        "manual_seed": generator.manual_seed, "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state), "default_generators": (generator,) * NUM_DEVICES,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=pin, cudaHostUnregister=unpin, cudaError=SimpleNamespace(success=0)),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in ("empty_cache", "memory_allocated", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats"):
        setattr(torch.accelerator, name, answers[name])
    torch.accelerator.empty_host_cache = answers["empty_cache"]
    torch.accelerator.get_memory_info = answers["mem_get_info"]
    torch.accelerator.memory_stats = lambda device=None: {"allocated_bytes.all.peak": library.peak_bytes()}
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(torch.cuda.random, name, answers[name])
    _pin_memory_utils.pin_memory, _pin_memory_utils.unpin_memory = pin, unpin


def _device_answers(library: Library) -> dict[str, object]:
    def index_of(device: object) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        return library.current_device() if index is None else index

    class DeviceContext:
        def __init__(self, device: object) -> None:
            self.index, self.before = index_of(device), -1

        def __enter__(self) -> None:
            self.before = library.current_device()
            library.set_device(self.index)

        def __exit__(self, *_: object) -> None:
            library.set_device(self.before)

    return {
        "is_available": lambda: True, "is_initialized": lambda: True, "_is_compiled": lambda: True, "init": lambda: None,
        "_lazy_init": lambda: None, "is_bf16_supported": lambda *_: True, "is_current_stream_capturing": lambda: False,
        "device_count": lambda: NUM_DEVICES, "current_device": library.current_device, "device": DeviceContext,
        "set_device": lambda device: library.set_device(index_of(device)),
    }  # fmt: skip
