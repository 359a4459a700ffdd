"""Two nodes simulated on one machine: two launchers that connect over loopback, with two processes
and a temporary folder each.

They train the same as one process, with tensor, pipeline and data parallelism across the nodes.
Losing one node ends the other.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_rl.launcher.spawn import omp_num_threads
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import ROOT, SUPPORT
from tests.support import fork_server
from tests.support.loopback_nodes import start_launchers

pytestmark = pytest.mark.timeout(300)
LAYOUTS = {  # tp, pp, vpp, sequence parallel, recomputation, model: the parallelism that crosses nodes
    "4,1,1,0,none,wide": "tp",
    "2,1,1,1,none,wide": "dp",
    "2,2,1,0,none,wide": "pp",
}
ONE_PROCESS = "1,1,1,0,none,wide"


@dataclass(frozen=True)
class Lost:
    """Result of two nodes, the second of which was killed at the end."""

    out: Path
    homes: list[Path]
    code: int
    said: str
    seconds: float
    left: list[int]
    """Ids of processes that still exist afterwards."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "wide", preset="nano", init="random", seed=1, heads=8, kv_heads=4)
    return folder


@pytest.fixture(scope="module")
def lost(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lost]:
    out, homes = tmp_path_factory.mktemp("nodes"), [tmp_path_factory.mktemp("home") for _ in range(2)]
    nodes = start_launchers(SUPPORT / "multi_node_world.py", models, out, *LAYOUTS, "until_lost", num_processes=2, temp_dirs=homes)
    try:
        deadline = time.monotonic() + 200
        while not (out / "places.json").exists():
            assert time.monotonic() < deadline and nodes[0].poll() is nodes[1].poll() is None, [n.output.read_text() for n in nodes]
            time.sleep(0.1)
        time.sleep(0.5)
        second = [psutil.Process(nodes[1].pid), *psutil.Process(nodes[1].pid).children()]
        began = time.monotonic()
        for process in second:
            process.send_signal(signal.SIGKILL)
        said, _ = nodes[0].communicate(timeout=50)
        pids = [place["pid"] for place in json.loads((out / "places.json").read_text())]
        yield Lost(out, homes, nodes[0].returncode, said, time.monotonic() - began, [pid for pid in pids if psutil.pid_exists(pid)])
    finally:
        for node in nodes:
            node.terminate(deadline=time.monotonic() + 5)


def test_two_nodes_train_what_one_does(lost: Lost, models: Path, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Losses and gradient norms of two steps with each layout equal those of one process, within
    1e-5.
    """
    torchrun(1, SUPPORT / "multi_node_world.py", models, tmp_path, ONE_PROCESS)
    one, two = (json.loads((out / "steps.json").read_text()) for out in (tmp_path, lost.out))
    assert two.keys() == LAYOUTS.keys()
    for layout, steps in two.items():
        for name, values in one[ONE_PROCESS].items():
            assert len(values) == 2 and steps[name] == pytest.approx(values, rel=1e-5), (LAYOUTS[layout], name)
    assert one[ONE_PROCESS]["loss"][0] != one[ONE_PROCESS]["loss"][1], "it learns something"
    places = json.loads((lost.out / "places.json").read_text())
    assert [(place["node"], place["local_rank"]) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [place["tmp"] for place in places] == [str(home) for home in lost.homes for _ in range(2)]


def test_a_node_that_is_lost_ends_the_other(lost: Lost) -> None:
    """The other node exits within 30 s with an error line that names the lost node and with exit
    code 1. No process remains.
    """
    assert lost.code == 1 and lost.seconds < 30 and not lost.left
    host = socket.gethostname()
    (line,) = [line for line in lost.said.splitlines() if "rank" in line]
    assert line.startswith(f"error: no response from ranks 2 and 3 (node 1, {host}); was a node lost"), lost.said
    assert "Traceback" not in lost.said and lost.said.splitlines()[-1] == line


def test_launchers_that_do_not_meet_say_where() -> None:
    """If the first node's port is taken, the launcher prints one line instead of a traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        meet = ("--nnodes", 2, "--node_rank", 0, "--master_addr", "127.0.0.1", "--master_port", port, "--nproc_per_node", 1)
        done = fork_server.run_script(ROOT / "launch" / "launch.py", *meet, SUPPORT / "multi_node_world.py", timeout_s=30)
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"error: --master_addr=127.0.0.1 --master_port={port}: the launchers of 2 nodes could not connect (")


def test_threads_are_a_ranks_part_of_the_cores_beside_gpus() -> None:
    """With GPUs, each rank gets an equal share of the cores as OpenMP threads, at least one.
    Without GPUs it gets one.
    """
    assert omp_num_threads(128, num_processes=8, num_gpus=8) == 16 and omp_num_threads(4, num_processes=8, num_gpus=8) == 1
    assert omp_num_threads(os.cpu_count() or 1, num_processes=1, num_gpus=0) == 1
