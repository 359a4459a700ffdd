"""Cost of one weight sync, compared with a plain copy of the same bytes.

    .venv/bin/python benchmarks/weight_sync.py --model runs/quickstart/nano

A weight sync passes Policy.hf_weights() to ColocatedEngine.load_weights, which also verifies the
weights. Each layout is measured in a separate run, in which copy, export and sync are timed in
turn. A time is the median over the repeats, measured on the slowest rank. `copy` copies all tensors
of the checkpoint into existing tensors on every rank; `export` only iterates over the unsharded
tensors. The target for the nano model is 100 ms per sync.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_rl.policy.network import TrainingSettings

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = {
    "1 process": (1, 1, 1),
    "tp2, two tp1 engines": (2, 1, 1),
    "pp2, two tp1 engines": (1, 2, 1),
    "pp2, one tp2 engine": (1, 2, 2),
}
"""Maps a layout's name to the trainer's tp and pp sizes and the engine's tp size."""


def measure(name: str, given: argparse.Namespace) -> None:
    """Measure a layout on all ranks and print a line on the main rank."""
    import torch
    import torch.distributed as dist

    from megatron_rl.build import build_colocated_engine
    from megatron_rl.config import EngineSettings, ModelSettings, ParallelSettings, Settings
    from megatron_rl.distributed.world import connect, read_world
    from megatron_rl.policy.parallel import build_layout
    from megatron_rl.policy.policy import Policy
    from megatron_rl.rollout.renderer import Renderer

    tp, pp, engine_tp = LAYOUTS[name]
    settings = Settings(model=ModelSettings(path=given.model), parallel=ParallelSettings(tp=tp, pp=pp), engine=EngineSettings(tp=engine_tp))
    world = read_world()
    connect(world, timeout_s=settings.parallel.timeout_s)
    renderer = Renderer(settings.model)
    policy = Policy(
        settings.model, build_layout(settings.parallel, seed=0),
        training=TrainingSettings(parallel=settings.parallel, optim=settings.optim, num_steps=1), special_tokens=renderer.special_tokens,
    )  # fmt: skip
    engine = build_colocated_engine(settings, renderer, world)
    tensors = [tensor.clone() for _, tensor in policy.hf_weights()]
    room = [torch.empty_like(tensor) for tensor in tensors]

    def copy() -> None:
        for into, tensor in zip(room, tensors, strict=True):
            into.copy_(tensor)

    def export() -> None:
        for _ in policy.hf_weights():
            pass

    def sync() -> None:
        engine.load_weights(policy.hf_weights(), version=0)

    def milliseconds(verb: Callable[[], None]) -> float:
        dist.barrier()
        started = time.perf_counter()
        verb()
        elapsed = torch.tensor(1e3 * (time.perf_counter() - started))
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return elapsed.item()

    verbs = (copy, export, sync)
    rounds = [[milliseconds(verb) for verb in verbs] for _ in range(given.repeats + 1)][1:]
    copied, exported, synced = (statistics.median(column) for column in zip(*rounds, strict=True))
    if world.is_main:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6
        worst = max(row[-1] for row in rounds)
        row = f"{name:22s} {len(tensors):8d} {size:6.1f} {copied:8.2f} {exported:9.2f} {synced:8.2f} {worst:8.2f} {synced / copied:12.1f}"
        print(row, flush=True)
    engine.close()


def main() -> None:
    """Start a run for each layout, or measure one layout if started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/quickstart/nano", help="a Hugging Face Qwen2.5-VL folder")
    parser.add_argument("--repeats", type=int, default=30, help="number of timed repetitions, after one warm-up")
    parser.add_argument(
        "--layout", choices=list(LAYOUTS), help="measure only this layout; the benchmark passes this option to its torchrun processes"
    )
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.layout, given)
        return
    columns = f"{'tensors':>8} {'MB':>6} {'copy ms':>8} {'export ms':>9} {'sync ms':>8} {'worst ms':>8} {'sync / copy':>12}"
    print(f"{'layout':22s} {columns}", flush=True)
    for name in [given.layout] if given.layout else LAYOUTS:
        tp, pp, _ = LAYOUTS[name]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        torchrun += ["--nproc_per_node", str(tp * pp)]
        own = [__file__, "--model", given.model, "--repeats", str(given.repeats), "--layout", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        run = subprocess.run([*torchrun, *own], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, check=False)
        if run.returncode:
            sys.exit(f"{name} exited with code {run.returncode}:\n{run.stderr[-2000:]}")
    print(f"load average now: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
