r"""Step time of visual search with slow tools, for run.max_staleness=0 and 1.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/staleness.py \
        --model runs/visual_search_seeds/seed0/sft/final --out runs/staleness
    # Smoke test:
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/staleness.py --model FOLDER --out runs/tiny --tiny

Each run executes launch/train.py on two ranks, each with its own engine. To measure a trainer with
a separate engine, add --ranks 1 engine.mode=server engine.num_local_servers=1. Tools run in a real
sandbox server behind a proxy that delays each tool response by a log-normal time (median 0.5 s,
sigma 1) or by a constant time (--sigma 0). Means exclude the first two steps and the last step, in
which fewer rollouts are in flight than run.max_staleness allows.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megatron_rl.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
TINY = ["batch.prompts_per_step=2", "batch.group_size=2", "run.steps=4"]
START_S = 120.0
KEPT = ("content-type", "retry-after")


class SlowTools:
    """Proxy in front of a sandbox server that delays calls by random times with a fixed seed."""

    def __init__(self, target: str, *, median: float, sigma: float) -> None:
        limits = httpx.Limits(max_connections=None)  # clients waiting for a box must not block others from closing theirs
        self.client = httpx.AsyncClient(base_url=target, timeout=600, limits=limits)
        self.median, self.sigma = median, sigma
        self.random = np.random.default_rng(0)
        self.app = Starlette(routes=[Route("/{path:path}", self.hand_on, methods=["GET", "POST", "DELETE"])])

    async def hand_on(self, request: Request) -> Response:
        """Forward a request; if the request is a tool call, delay the response."""
        is_call = request.url.path.endswith("/calls")
        latency = self.median * float(np.exp(self.sigma * self.random.standard_normal())) if is_call else 0.0
        body = await request.body()
        given = {name: value for name, value in request.headers.items() if name in ("content-type", "authorization")}
        answer = await self.client.request(request.method, request.url.path, content=body, headers=given)
        await asyncio.sleep(latency)
        headers = {name: answer.headers[name] for name in KEPT if name in answer.headers}
        return Response(answer.content, status_code=answer.status_code, headers=headers)


@contextmanager
def slow_sandbox(size: int, *, median: float, sigma: float) -> Iterator[str]:
    """Run a sandbox server behind a `SlowTools` proxy and yield the proxy's URL."""
    command = [sys.executable, "-m", "megatron_rl_sandbox", "serve", "--port", "0", "--size", str(size), "--wait", "300"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as behind:
        assert behind.stdout
        target = next(word for word in behind.stdout.readline().split() if word.startswith("http://"))
        config = uvicorn.Config(SlowTools(target, median=median, sigma=sigma).app, port=0, log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            deadline = time.monotonic() + START_S
            while not server.started and time.monotonic() < deadline:
                time.sleep(0.1)
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            behind.terminate()


def played(folder: Path, ranks: int, *overrides: str) -> list[dict[str, float]]:
    """Execute a training run and return the metrics of its training steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "launch/train.py"]
    given = ["experiment=visual_search_python_cpu", f"run.dir={folder}", "task.data.max_eval=4", "task.eval_samples=1", *overrides]
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run([*command, *given], cwd=ROOT, check=True, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [line for line in read_metrics(folder / "metrics.jsonl") if "reward/mean" in line]


def row(steps: list[dict[str, float]]) -> list[str]:
    """Return the table cells for one run."""
    counted = steps[2:-1]
    names = ("time/total", "time/update", "rollout/staleness", "rollout/stale_fraction", "reward/mean")
    total, update, staleness, stale, reward = (statistics.fmean(step.get(name, 0.0) for step in counted) for name in names)
    return [f"{total:.2f}", f"{update:.2f}", f"{staleness:.2f}", f"{stale:.1%}", f"{reward:.2f}", f"{os.getloadavg()[0]:.1f}"]


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model after the warm start")
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--median", type=float, default=0.5, help="median latency of a tool call in seconds")
    parser.add_argument(
        "--sigma", type=float, default=1.0, help="standard deviation of the log latency; 0: the same latency for every call"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", type=int, default=128, help="boxes")
    parser.add_argument("--tiny", action="store_true", help="smoke test: four small steps")
    parser.add_argument("overrides", nargs="*", help="additional settings of the runs, KEY=VALUE")
    given = parser.parse_intermixed_args()  # settings and options may be mixed
    given.out.mkdir(parents=True, exist_ok=True)
    print("| max staleness | s / step | s / update | mean staleness | stale rollouts | reward | load average |\n|" + "---|" * 7, flush=True)
    for staleness in given.staleness:
        with slow_sandbox(given.size, median=given.median, sigma=given.sigma) as url:
            words = [f"model.path={given.model}", f"task.sandbox.url={url}", f"run.max_staleness={staleness}", "run.steps=30"]
            folder = given.out.resolve() / f"staleness{staleness}"
            steps = played(folder, given.ranks, *words, *(TINY if given.tiny else []), *given.overrides)
        print(f"| {' | '.join([str(staleness), *row(steps)])} |", flush=True)


if __name__ == "__main__":
    main()
