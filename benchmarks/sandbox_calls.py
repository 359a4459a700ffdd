"""Latency and throughput of sandbox calls, and resource leaks after ten thousand calls.

    .venv/bin/python benchmarks/sandbox_calls.py                # about four minutes on two cores
    .venv/bin/python benchmarks/sandbox_calls.py --parts warm throughput
    # Smoke test:
    .venv/bin/python benchmarks/sandbox_calls.py --repeats 3 --clients 2 --seconds 0.1 --calls 200

Prints Markdown tables. A warm call is a call of `box.run` on an open box. In throughput
measurements, every client has its own box. The tables compare sandboxes that use all isolation
layers available on this host with sandboxes without isolation. Both kinds of sandboxes are measured
in the same run.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from PIL import Image

from megatron_rl_sandbox import Box, BoxLimits, CallResult, Fault, SandboxPool
from megatron_rl_sandbox.image_codec import encode_png
from megatron_rl_sandbox.sandbox_client import RemoteBox, SandboxClient

CODES = {
    "print": "print(1 + 1)",
    "Pillow crop, returned as PNG": "image_0.crop((40, 40, 340, 240)).show()",
    "matplotlib figure": "import matplotlib.pyplot as plt\nplt.figure()\nplt.plot([1, 3, 2])\nplt.show()",
}
PNG = encode_png(Image.effect_noise((640, 480), 40).convert("RGB"))
LIMITS = BoxLimits(images_total=1_000_000)
CALLS_PER_BOX, TIMEOUT_EVERY = 100, 20


@dataclass(slots=True, frozen=True)
class Sizes:
    """Number and duration of measurements."""

    repeats: int
    """Number of calls from which a median is computed."""
    clients: int
    seconds: float
    """Duration of each throughput measurement in seconds."""
    calls: int
    """Number of calls in the leak test."""
    port: int


def checked(result: CallResult, *, code: str) -> None:
    """Assert that a call succeeded and, if its code calls show(), returned an image."""
    assert result.fault is Fault.NONE and len(result.images) == ("show()" in code) and not result.dropped, result


async def timed(work: Callable[[], Awaitable[object]], *, repeats: int) -> list[float]:
    """Return the sorted durations of `repeats` calls in ms, after at most ten warm-up calls."""
    spent, uncounted = [], min(10, repeats)
    for number in range(repeats + uncounted):
        started = time.perf_counter()
        await work()
        spent += [1e3 * (time.perf_counter() - started)] if number >= uncounted else []
    return sorted(spent)


def row(name: str, *columns: list[float]) -> str:
    """Return a table row with the median and the 95th percentile of each list of durations."""
    cells = [f"{statistics.median(spent):.1f} | {spent[int(0.95 * len(spent))]:.1f}" for spent in columns]
    return f"| {name} | {' | '.join(cells)} |"


async def warm(sizes: Sizes) -> None:
    """Measure the latency of warm calls, and of opening a box for a single call."""
    columns: dict[str, list[list[float]]] = {}
    for isolation in ("auto", "none"):
        started = time.perf_counter()
        async with SandboxPool(size=4, limits=LIMITS, isolation=isolation) as pool:
            print(f"Pool started in {time.perf_counter() - started:.2f} s, layers: {', '.join(pool.layers.enabled_names()) or 'none'}.\n")
            async with await pool.open(images={"image_0": PNG}) as box:
                for name, code in CODES.items():
                    spent = await timed(lambda code=code, box=box: _run(box, code), repeats=sizes.repeats)
                    columns.setdefault(f"warm call: {name}", []).append(spent)

            async def cycle(pool: SandboxPool = pool) -> None:
                async with await pool.open() as box:
                    checked(await box.run(CODES["print"]), code=CODES["print"])

            columns.setdefault("open, print, close", []).append(await timed(cycle, repeats=min(100, sizes.repeats)))
    print("| latency, ms | median | 95th percentile | no isolation: median | no isolation: 95th percentile |\n|---|---|---|---|---|")
    for name, pair in columns.items():
        print(row(name, *pair))
    plain = []
    for _ in range(min(5, sizes.repeats)):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", "import numpy, PIL.Image, matplotlib.pyplot; print(1 + 1)"], check=True, stdout=subprocess.DEVNULL
        )
        plain.append(1e3 * (time.perf_counter() - started))
    print(f"\nFor comparison, a new `python -c` process that imports numpy, Pillow and pyplot takes {statistics.median(plain):.0f} ms.\n")


async def _run(box: Box, code: str) -> None:
    checked(await box.run(code), code=code)


async def per_second(pool: SandboxPool | SandboxClient, sizes: Sizes, *, reopen: bool) -> dict[str, float]:
    """Return the total calls per second of the concurrent clients, keyed by the code's name.

    By default, each client uses one box that was opened before the start; with `reopen`, each call
    uses a new box.
    """
    rates = {}
    for name, code in CODES.items():
        boxes = await asyncio.gather(*[pool.open(images={"image_0": PNG}) for _ in range(sizes.clients)])
        done = 0
        started = time.perf_counter()

        async def client(box: Box | RemoteBox, code: str = code, started: float = started) -> None:
            nonlocal done
            while time.perf_counter() < started + sizes.seconds:
                checked(await box.run(code), code=code)
                done += 1
                if reopen:
                    await box.close()
                    box = await pool.open(images={"image_0": PNG})
            await box.close()

        await asyncio.gather(*[client(box) for box in boxes])
        rates[name] = done / (time.perf_counter() - started)
    return rates


@contextmanager
def server(sizes: Sizes) -> Iterator[str]:
    """Run a sandbox server and yield its URL."""
    command = [sys.executable, "-m", "megatron_rl_sandbox", "serve", "--port", str(sizes.port), "--size", str(sizes.clients)]
    command += ["--limit", "images_total=1000000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{sizes.port}"
    finally:
        process.terminate()
        process.wait(30)


async def _until_up(url: str) -> SandboxClient:
    for _ in range(300):
        try:
            client = SandboxClient(url)
            await client.start()
            return client
        except RuntimeError:
            await client.close()
            await asyncio.sleep(0.1)
    raise TimeoutError("the server did not start")


async def throughput(sizes: Sizes) -> None:
    """Measure calls per second with a pool in this process, over HTTP, and without isolation."""
    tables = {}
    async with SandboxPool(size=sizes.clients, limits=LIMITS) as pool:
        tables["in process, one open box per client"] = await per_second(pool, sizes, reopen=False)
        tables["in process, a new box per call"] = await per_second(pool, sizes, reopen=True)
    with server(sizes) as url:
        async with await _until_up(url) as client:
            tables["over HTTP, one open box per client"] = await per_second(client, sizes, reopen=False)
    async with SandboxPool(size=sizes.clients, limits=LIMITS, isolation="none") as pool:
        tables["no isolation, in process, one open box per client"] = await per_second(pool, sizes, reopen=False)
    print(f"Calls per second, {sizes.clients} clients, {os.cpu_count()} cores:\n\n| | {' | '.join(CODES)} |\n|---|{'---|' * len(CODES)}")
    for name, rates in tables.items():
        print(f"| {name} | {' | '.join(f'{rate:.0f}' for rate in rates.values())} |")
    print()


def standing() -> dict[str, int]:
    """Count the resources whose number would increase with a leak.

    These are child processes, file descriptors and threads of this process, temporary files and
    control groups with the sandbox's names, mounts, and IPC objects.
    """
    own = psutil.Process()
    groups = Path("/sys/fs/cgroup")
    return {
        "processes": len(own.children(recursive=True)),
        "processes of the machine": len(psutil.pids()),
        "descriptors": own.num_fds(),
        "threads": own.num_threads(),
        "temporary files": sum(len(list(Path(place).glob("sandbox*"))) for place in {tempfile.gettempdir(), "/dev/shm", "/var/tmp"}),
        "control groups": sum(1 for _ in groups.rglob(f"sandbox-{own.pid}-*")) if groups.exists() else 0,
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "IPC objects": sum(len(Path(f"/proc/sysvipc/{kind}").read_text().splitlines()) - 1 for kind in ("shm", "msg", "sem")),
    }


async def leaks(sizes: Sizes) -> None:
    """Run thousands of calls and compare the resource counts before and after.

    Each client opens a new box every hundred calls. In every twentieth box, one call forks a
    process and runs until its timeout.
    """
    mixed = [*CODES.values(), 'open("kept.bin", "wb").write(bytes(100000))', "1 / 0"]
    before = standing()
    started = time.perf_counter()
    async with SandboxPool(size=8, limits=LIMITS) as pool:
        async with await pool.open(images={"image_0": PNG}) as box:
            await box.run(CODES["print"])
        warm_up = standing()
        memory = psutil.Process().memory_info().rss

        async def client(number: int) -> int:
            lost = 0
            for turn in range(sizes.calls // CALLS_PER_BOX // 8 + (number < sizes.calls // CALLS_PER_BOX % 8)):
                async with await pool.open(images={"image_0": PNG}) as box:
                    for call in range(CALLS_PER_BOX):
                        if call == 50 and (8 * turn + number) % TIMEOUT_EVERY == 0:
                            result = await box.run("import os\nos.fork()\nwhile True: pass", timeout_s=0.2)
                            assert result.limit == "time", result
                        else:
                            result = await box.run(mixed[(call + turn) % len(mixed)])
                            assert result.fault is not Fault.HOST, result
                        lost += result.state_lost
            return lost

        lost = sum(await asyncio.gather(*[client(number) for number in range(8)]))
        at_end = standing()
        grown = (psutil.Process().memory_info().rss - memory) / 2**20
    await asyncio.get_running_loop().shutdown_default_executor()  # threads that parse large replies belong to the event loop
    after = standing()
    print(f"{sizes.calls} calls in {time.perf_counter() - started:.0f} s, {lost} of them reported that earlier state was lost:\n")
    print(
        "| resource | before the pool starts | after one call, no open boxes | after all calls, no open boxes "
        "| after the pool is closed |\n|---|---|---|---|---|"
    )
    for name in before:
        print(f"| {name} | {before[name]} | {warm_up[name]} | {at_end[name]} | {after[name]} |")
    print(f"\nResident memory of the pool's own process grew by {grown:.1f} MiB during the calls.")
    own = {name for name in before if name != "processes of the machine"}  # other programs start and end processes during the test
    assert all(after[name] <= before[name] for name in own), "resources were leaked"


PARTS = {"warm": warm, "throughput": throughput, "leaks": leaks}


def main() -> None:
    """Run the selected parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=300, help="number of calls per median")
    parser.add_argument("--clients", type=int, default=32, help="concurrent clients of the throughput measurement")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each throughput measurement")
    parser.add_argument("--calls", type=int, default=10_000, help=f"number of calls of the leak test; a multiple of {CALLS_PER_BOX}")
    parser.add_argument("--port", type=int, default=18080, help="port of the server in the throughput measurement")
    given = parser.parse_args()
    print(f"Load average at the start: {', '.join(f'{load:.1f}' for load in os.getloadavg())}.\n")
    for part in given.parts:
        asyncio.run(PARTS[part](Sizes(given.repeats, given.clients, given.seconds, given.calls, given.port)))


if __name__ == "__main__":
    main()
