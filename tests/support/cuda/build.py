"""Compiles the emulated CUDA device (device.cpp and its headers) and keeps the library in a cache folder."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
BUILD_TIMEOUT_S = 300


def has_compiler() -> bool:
    """Return True if g++ is installed."""
    return shutil.which("g++") is not None


def torch_folder() -> Path:
    """Return the folder of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def build_library() -> Path:
    """Return the compiled library, after compiling it if the cache lacks it.

    The file name contains a hash of the sources and of torch's version. Compiling takes about 13 s
    of CPU time. Raises CalledProcessError if g++ fails; its output goes to standard error.
    """
    sources = b"".join(path.read_bytes() for path in sorted(SOURCE.parent.iterdir()) if path.suffix in (".cpp", ".h"))
    key = hashlib.sha256(sources + version("torch").encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_rl_tests"
    library = cache / f"emulated_cuda_{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        torch = torch_folder()
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / library.name
            includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
            command = ["g++", "-O1", "-g0", "-std=c++20", "-shared", "-fPIC", "-w", str(SOURCE), "-o", str(made), *includes]
            subprocess.run([*command, f"-L{torch}/lib", "-ltorch_cpu", "-lc10"], check=True, timeout=BUILD_TIMEOUT_S)
            made.replace(library)  # atomic, because several test processes may compile
    return library
