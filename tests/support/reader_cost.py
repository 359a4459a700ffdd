"""Reads files as the trainer does, or as a library does by itself, and reports the error and the
cost of each read.

    reader_cost.py READER PATH [READER PATH ...]

Prints a line of JSON per file: error, mb (growth of the peak memory, including child processes),
cpu_s.
"""

import contextlib
import json
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml


def open_data_rows(path: Path) -> None:
    from megatron_rl.data.rows import open_rows

    found = open_rows(path)
    found[len(found) - 1]


def open_stored_image(path: Path) -> None:
    from megatron_rl.data.images import StoredImage

    image = StoredImage(path, path.name)
    image.size()
    image.check_complete()
    image.open()


def load_torch_file(path: Path) -> None:
    from megatron_rl.weights.formats import pickle_tensors

    found = pickle_tensors.load(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}")
    found["w"].read()


def open_mcore_tensors(path: Path) -> None:
    from megatron_rl.weights.formats.torch_dist import McoreTensors

    McoreTensors(path)


def open_hf_tensors(path: Path) -> None:
    from megatron_rl.weights.formats.safetensors_folder import HfTensors

    HfTensors(path)


def parse_model_spec(path: Path) -> None:
    from megatron_rl.models.hf_config import read_spec

    read_spec(path)


def load_run_settings(path: Path) -> None:
    from megatron_rl.run.changed_settings import read_settings

    str(read_settings(path))


def load_json_lines(path: Path) -> None:
    from megatron_rl.io.jsonl import read_lines

    read_lines(path)


def read_with_pyarrow_parquet(path: Path) -> None:
    import pyarrow.parquet as pq

    next(pq.ParquetFile(path).iter_batches(batch_size=1024))


def read_with_pyarrow_ipc(path: Path) -> None:
    import pyarrow as pa

    pa.ipc.open_file(pa.memory_map(str(path))).read_all().slice(1, 1).to_pylist()


def read_with_torch(path: Path) -> None:
    import torch

    found = torch.load(path, weights_only=True, map_location="meta")
    if isinstance(found, dict):
        torch.empty(
            1 + sum((size - 1) * step for size, step in zip(found["w"].shape, found["w"].stride(), strict=True)), dtype=torch.float32
        )


READERS: dict[str, Callable[[Path], object]] = {
    "rows": open_data_rows, "picture": open_stored_image, "torch": load_torch_file, "metadata": open_mcore_tensors, "hf": open_hf_tensors,
    "spec": parse_model_spec, "settings": load_run_settings,
    "lines": load_json_lines, "by parquet": read_with_pyarrow_parquet, "by arrow": read_with_pyarrow_ipc, "by torch": read_with_torch,
    "by pickle": lambda path: pickle.loads(path.read_bytes()),
    "by json": lambda path: json.loads(path.read_bytes()[8:]),
    "by yaml": lambda path: len(str(yaml.safe_load(path.read_text())["a6"])) * 100,
    "by bytes": lambda path: path.read_bytes(),
}  # fmt: skip


@dataclass(slots=True, frozen=True)
class ReadResult:
    error: str
    mb: int
    """Growth of the peak memory in MB, of this process or of a child process."""
    cpu_s: float


def measure_reads(*files: tuple[str, Path], memory_gb: int = 8) -> list[ReadResult | None]:
    """Return the cost of reading each file in one process, and None for the file whose read ended
    the process and for those after it. The process may use at most `memory_gb`.
    """
    words = [str(word) for pair in files for word in pair]
    most = memory_gb << 30
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, timeout=280, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)),
    )  # fmt: skip
    lines = [ReadResult(**json.loads(line)) for line in done.stdout.splitlines()]
    assert done.returncode <= 0, done.stderr[-3000:]
    return lines + [None] * (len(files) - len(lines))


def is_cheap(result: ReadResult | None) -> bool:
    """Check that a read failed with a one-line ValueError of this trainer and used at most 100 MB
    and 10 s of CPU time.
    """
    assert result is not None
    assert result.error.startswith("ValueError: ") and "\n" not in result.error and len(result.error) < 900, result
    assert result.mb <= 100 and result.cpu_s <= 10, result
    return True


def peak_memory_kib() -> int:
    """Return the peak memory in KiB of this process since its start, or of its children. ru_maxrss
    of this process would include the process that it was forked from.
    """
    status = Path("/proc/self/status").read_text().split()
    return max(int(status[status.index("VmHWM:") + 1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its child processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    for reader, path in zip(sys.argv[1::2], map(Path, sys.argv[2::2]), strict=True):
        before, began = peak_memory_kib(), cpu_seconds()
        said = ""
        with contextlib.redirect_stdout(sys.stderr):
            try:
                READERS[reader](path)
            except (ValueError, MemoryError, RecursionError, OSError, RuntimeError, pickle.UnpicklingError) as error:
                said = f"{type(error).__name__}: {error}"
        print(
            json.dumps({"error": said[:2000], "mb": (peak_memory_kib() - before) >> 10, "cpu_s": round(cpu_seconds() - began, 2)}),
            flush=True,
        )


if __name__ == "__main__":
    main()
