"""Peak memory and wall time of checkpoint conversion, compared with a copy of the same bytes.

    .venv/bin/python benchmarks/convert.py --sizes 3B 7B --folder runs/convert
    # With an existing model, e.g. as a smoke test:
    .venv/bin/python benchmarks/convert.py --models runs/quickstart/nano --folder runs/convert

Unless --models is given, models with the released shapes and random weights are written first
(tools/data/make_shapes.py). For each direction, three operations are timed: a copy, the conversion,
and a second copy. A copy consists of `cp --reflink=never` and a `sync` of the result; the
conversion tool itself flushes its result to disk. Before each operation, the source is evicted from
the page cache (posix_fadvise); after each operation, its result is deleted. Peak memory is the
tool's ru_maxrss from wait4; the tools start no child processes. The target for peak memory is at
most three times the size of the largest tensor plus 1.5 GiB. The target for the conversion time is
at most 1.5 times the time of a copy.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED_GB = 40
GIB = 2**30


@dataclass(slots=True, frozen=True)
class Cost:
    """Time and peak memory of one command."""

    seconds: float
    peak_bytes: int


def cost(*command: str) -> Cost:
    """Run a command and return its cost; if the command fails, print its output and exit."""
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    said = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} exited with code {process.returncode}:\n{said}")
    return Cost(time.perf_counter() - started, usage.ru_maxrss * 1024)


def make_cold(folder: Path) -> None:
    """Evict the files in a folder from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copied(source: Path, copy: Path) -> float:
    """Copy a folder, flush the copy to disk, and return the time in seconds."""
    make_cold(source)
    seconds = cost("sh", "-c", f"cp -r --reflink=never '{source}' '{copy}' && find '{copy}' -type f -exec sync {{}} +").seconds
    shutil.rmtree(copy)
    return seconds


def converted(source: Path, *command: str) -> Cost:
    """Evict the source from the page cache, run a conversion and return its cost."""
    make_cold(source)
    return cost(sys.executable, *command)


def largest_tensor(folder: Path) -> int:
    """Return the size of the largest tensor in bytes, read from the safetensors headers."""
    largest = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        largest = max([largest, *(end - start for start, end in offsets)])
    return largest


def size_of(folder: Path) -> int:
    """Return the total size of the files in a folder, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def needed_gb(models: list[Path] | None) -> float:
    """Return the disk space in GB needed for a copy, the result, and a copy of the result.

    If `models` is None, return the disk space needed for a 7B model, including the source.
    """
    return NEEDED_GB if models is None else 3 * max(map(size_of, models)) / 1e9


def report(direction: str, num_bytes: int, largest: int, copies: list[float], tool: Cost) -> None:
    """Print one row of the table."""
    copy = sum(copies) / len(copies)
    bound = 3 * largest + 1.5 * GIB
    print(
        f"{direction:24s} {num_bytes / 1e9:6.1f} {largest / GIB:8.2f} {tool.peak_bytes / GIB:8.2f} {bound / GIB:6.2f} "
        f"{copies[0]:7.1f} {copies[1]:7.1f} {tool.seconds:7.1f} {tool.seconds / copy:6.2f}   {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def measure(name: str, hf: Path, folder: Path) -> None:
    """Measure the conversion of the Hugging Face folder `hf` to Megatron and back.

    Results are written to `folder`. If `hf` is inside `folder`, `hf` is deleted as soon as it is no
    longer needed.
    """
    mcore, merged, copy = (folder / name for name in ("mcore", "merged", "copy"))
    largest = largest_tensor(hf)
    before = copied(hf, copy)
    tool = converted(hf, str(ROOT / "tools/convert/converter_hf_to_mcore.py"), "--hf", str(hf), "--out", str(mcore))
    report(f"{name} to Megatron", size_of(hf), largest, [before, copied(hf, copy)], tool)
    if hf.parent == folder:
        shutil.rmtree(hf)
    before = copied(mcore, copy)
    tool = converted(mcore, str(ROOT / "tools/convert/merger.py"), "--checkpoint", str(mcore), "--out", str(merged))
    shutil.rmtree(merged)
    report(f"{name} to Hugging Face", size_of(mcore), largest, [before, copied(mcore, copy)], tool)
    shutil.rmtree(mcore)


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["3B", "7B"])
    parser.add_argument("--layers", type=int, help="decoder layers, for a quick test; default: those of the released model")
    parser.add_argument("--models", type=Path, nargs="+", metavar="DIR", help="convert these Hugging Face folders instead of --sizes")
    parser.add_argument("--folder", type=Path, required=True, help="new folder on the disk to measure; removed afterwards")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    free, needed = shutil.disk_usage(given.folder).free / 1e9, needed_gb(given.models)
    if free < needed:
        given.folder.rmdir()
        sys.exit(f"SKIPPED: {free:.0f} GB are free on the disk of {given.folder}, {needed:.0f} GB are required; nothing was measured")
    try:
        print(
            f"{'':24s} {'GB':>6} {'largest':>8} {'peak GiB':>8} {'bound':>6} {'copy s':>7} {'copy s':>7} {'tool s':>7} {'ratio':>6}  load"
        )
        for model in given.models or []:
            measure(model.name, model, given.folder)
        for size in [] if given.models else given.sizes:
            layers = [] if given.layers is None else ["--layers", str(given.layers)]
            hf = given.folder / "hf"
            cost(sys.executable, str(ROOT / "tools/data/make_shapes.py"), "--size", size, "--out", str(hf), *layers)
            measure(size, hf, given.folder)
    finally:
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
