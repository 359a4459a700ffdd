"""Simulates nodes on one machine that communicate over the loopback interface: launchers with a
temporary folder each, or ranks without a launcher.
"""

from collections.abc import Sequence
from pathlib import Path

from tests.support import fork_server
from tests.support.free_port import free_port


def start_launchers(script: Path, *arguments: object, num_processes: int, temp_dirs: Sequence[Path]) -> list[fork_server.Process]:
    """Start launch/launch.py once per node. Each node has its own temporary folder."""
    meet = ("--nnodes", len(temp_dirs), "--master_addr", "127.0.0.1", "--master_port", free_port(), "--nproc_per_node", num_processes)
    spawn = fork_server.ROOT / "launch" / "launch.py"
    return [
        fork_server.Process(spawn, *meet, "--node_rank", node, script, *arguments, environment={"TMPDIR": str(home)})
        for node, home in enumerate(temp_dirs)
    ]


def start_ranks(script: Path, *arguments: object, folders: Sequence[Path]) -> list[fork_server.Process]:
    """Start one rank per folder as a node of its own, with the environment variables of torchrun.

    The folder is also the node's temporary folder.
    """
    size, port = len(folders), free_port()
    world = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "GROUP_WORLD_SIZE": str(size), "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }  # fmt: skip
    return [
        fork_server.Process(
            script, *arguments, cwd=folder,
            environment={**world, "RANK": str(node), "GROUP_RANK": str(node), "TMPDIR": str(folder)},
        )
        for node, folder in enumerate(folders)
    ]  # fmt: skip
