"""The doctor's checks of a multi-process job.

The findings of all nodes are merged. Further checks cover shared files, all-reduce bandwidth, clock
skew and the time left in the job.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from megatron_rl.config import Settings
from megatron_rl.distributed.world import World, all_gather_object, connect, disconnect, run_on_rank_zero
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.preflight.check_report import CheckReport
from megatron_rl.preflight.nodes import check_nodes
from megatron_rl.run.changed_settings import read_settings
from megatron_rl.run.paths import CONFIG_FILE

RENDEZVOUS_TIMEOUT_S = 600.0
"""Timeout of the rendezvous in seconds. A long timeout is needed because some nodes may have to
check more data than other nodes.
"""
ALL_REDUCE_BYTES, NUM_ROUNDS = 64 << 20, 5
MIN_BYTES_PER_S = 1e9
"""All-reduce bandwidth in bytes per second below which GPU nodes probably use the wrong network
interface.
"""
LAST_STEPS = 10
STEP_TIMES = ("time/engine", "time/environment", "time/update", "time/checkpoint", "time/sync", "time/record")
MAX_CLOCK_SKEW_S = 1.0
"""Clock skew in seconds above which times in logs and checkpoints are misleading."""


def run_checks_on_nodes(settings: Settings, world: World, run_node_checks: Callable[[], CheckReport]) -> CheckReport:
    """Run the checks on the first rank of each node, and return the merged report on every rank."""
    # must run before the rendezvous, because the memory plan creates its own process group
    mine = run_node_checks() if world.is_local_main else None
    connect(world, timeout_s=RENDEZVOUS_TIMEOUT_S)
    try:
        found = [
            (node, report)
            for node, report in all_gather_object((f"node {world.node} ({socket.gethostname()})", mine))
            if report is not None
        ]
        whole = merge_reports(dict(found))
        check_job_nodes(settings, world, whole)
        check_all_reduce(world, whole)
        check_clocks(world, whole)
        return whole
    finally:
        disconnect()


def merge_reports(reports: dict[str, CheckReport]) -> CheckReport:
    """Merge the nodes' reports.

    If only some nodes report an error or a warning, the names of these nodes are appended to the
    text of the error or warning.
    """
    whole = CheckReport(findings=[(f"{node}: {what}", found) for node, report in reports.items() for what, found in report.findings])
    for kind in ("errors", "warnings"):
        told = {node: getattr(report, kind) for node, report in reports.items()}
        for line in dict.fromkeys(line for lines in told.values() for line in lines):
            nodes = [node for node, lines in told.items() if line in lines]
            getattr(whole, kind).append(line if len(nodes) == len(reports) else f"{line} ({', '.join(nodes)})")
    return whole


def check_job_nodes(settings: Settings, world: World, report: CheckReport) -> None:
    """Run the multi-node checks that a run performs at its start (preflight/nodes.py).

    If the run directory does not exist, it is created for these checks and removed afterwards.
    """
    folder = Path(settings.run.dir)
    try:
        run_on_rank_zero(lambda: folder.mkdir(parents=True, exist_ok=True))
        check_nodes(settings, world)
    except (ValueError, OSError) as error:
        report.add_failure("nodes", str(error))
    else:
        report.add_finding("nodes", f"{world.num_nodes}, {world.size} ranks")
    finally:
        run_on_rank_zero(lambda: _remove_empty(folder))


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # the directory is not empty: it contains a run
        folder.rmdir()


def check_all_reduce(world: World, report: CheckReport) -> None:
    """Measure the all-reduce bandwidth over all ranks.

    The first round is not counted, because the connections are opened during this round.
    """
    number_T = torch.zeros(ALL_REDUCE_BYTES // 4, device=world.device)
    seconds = []
    for _ in range(NUM_ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(number_T)
        number_T[0].item()  # waits until the GPU has finished
        seconds.append(time.perf_counter() - began)
    speed = min(all_gather_object(ALL_REDUCE_BYTES * 2 * (world.size - 1) / world.size / min(seconds[1:])))
    report.add_finding("all-reduce", f"{world.size} ranks, {ALL_REDUCE_BYTES >> 20} MiB: {speed / 1e9:.1f} GB/s")
    if world.num_nodes > 1 and world.device.type == "cuda" and speed < MIN_BYTES_PER_S:
        report.warnings.append(
            f"NCCL_SOCKET_IFNAME: {speed / 1e9:.2f} GB/s between the ranks; set it to the fast interface, or set NCCL_IB_HCA"
        )


def check_clocks(world: World, report: CheckReport) -> None:
    """Compare each node's clock with rank 0's clock; all clocks are read after a barrier."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        dist.barrier()
        rounds.append(time.time())
    everyones = all_gather_object((world.node, socket.gethostname(), rounds))
    apart = {f"node {node} ({host})": _clock_offset(read, everyones[0][2]) for node, host, read in everyones}
    report.add_finding("clocks", f"at most {max(map(abs, apart.values())):.3f} s apart")
    for name, ahead in apart.items():
        if abs(ahead) > MAX_CLOCK_SKEW_S:
            told = "ahead of" if ahead > 0 else "behind"
            report.warnings.append(f"clock: the clock of {name} is {abs(ahead):.1f} s {told} that of rank 0; set it (chronyc makestep)")


def _clock_offset(read: list[float], first: list[float]) -> float:
    return median(mine - other for mine, other in zip(read, first, strict=True))


def check_time_left(settings: Settings, report: CheckReport) -> None:
    """Warn if the Slurm job will probably end before the remaining steps are finished.

    The estimate is based on the last steps of an earlier attempt, and on the job's end time in
    SLURM_JOB_END_TIME.
    """
    end, metrics = os.environ.get("SLURM_JOB_END_TIME"), Path(settings.run.dir) / "metrics.jsonl"
    steps = [step for step in read_metrics(metrics) if "time/update" in step] if metrics.is_file() else []
    if end is None or not steps or settings.stage != "rl":
        return
    takes = median(sum(seconds for name, seconds in step.items() if name in STEP_TIMES) for step in steps[-LAST_STEPS:])
    num_steps = read_settings(Path(settings.run.dir) / CONFIG_FILE)["run"]["steps"] if settings.run.epochs else settings.run.steps
    left, planned = int(end) - time.time(), num_steps - (steps[-1]["step"] + 1)
    report.add_finding("time", f"{planned:.0f} steps of {takes:.1f} s, {left / 3600:.1f} hours left")
    if planned * takes > left:
        remedy = f"{max(left, 0) / takes:.0f} fit into the job; the same command resumes the run in the next job"
        report.warnings.append(f"run.steps={num_steps}: {planned:.0f} steps of {takes:.1f} s are left, {remedy}")
